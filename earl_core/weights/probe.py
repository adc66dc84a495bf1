"""The probe that a publication carries, so that an engine proves which weights it holds.

The learner says which token is the most likely next one after some beginnings of rows of its last
batch, and its log-prob. An engine that has loaded the version answers one greedy token to each:
sampled and not scored, as episodes are played, past the same cache of prefixes.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

PREFIXES = "prefixes"
"""Among the outputs of an update: the beginnings of rows for the probe of the version it made."""


class Prefixes(BaseModel):
    """Beginnings of one row of training data. tokens: of the longest one. lengths: of each,
    ascending, from 1 to the number of tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: tuple[int, ...]
    lengths: tuple[int, ...]


class ProbedRow(Prefixes):
    """The learner's answers to them. likeliest: the next token after each. logprobs: its log-prob
    in nats, at temperature 1."""

    likeliest: tuple[int, ...]
    logprobs: tuple[float, ...]
