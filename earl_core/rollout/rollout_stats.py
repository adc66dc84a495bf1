"""Counts and sums of played episodes: what several engines' results are made one of.

Means, percentiles and shares cannot be added up, what they are made of can. Every number about a
rollout follows from a `RolloutStats`, so that none depends on how many engines played, or on
episodes that had to be played again. An engine's worker counts, the controller merges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import zip_longest
from typing import Any

from pydantic import BaseModel, Field

from earl_core.algorithms.moments import Moments
from earl_core.rollout.load_meter import LoadMeter, RolloutLoad
from earl_core.trajectory.samples import Episode

Pair = list[float]
"""[sum, count]."""

_REASONS_KEPT = 16
_REASON_CHARACTERS = 400


class RolloutStats(BaseModel):
    """Of unfailed episodes, except `failed` and `failures`, which maps why episodes failed to how
    often; a rank tells the most frequent only. Histograms map a value to how often it occurred.

    contexts and turns: of each episode. context_by_turn: the tokens that stand after each turn.
    environment: the environment's own metrics.
    """

    episodes: int = 0
    failed: int = 0
    failures: dict[str, int] = Field(default_factory=dict)
    samples: int = 0
    answered_tokens: int = 0
    returns: Moments = Moments()
    contexts: dict[int, int] = Field(default_factory=dict)
    turns: dict[int, int] = Field(default_factory=dict)
    context_by_turn: list[Pair] = Field(default_factory=list)
    outcomes: dict[str, int] = Field(default_factory=dict)
    finishes: dict[str, int] = Field(default_factory=dict)
    environment: dict[str, Pair] = Field(default_factory=dict)
    load: RolloutLoad = Field(default_factory=RolloutLoad)

    @classmethod
    def of(cls, played: Sequence[Episode], meter: LoadMeter) -> RolloutStats:
        """Of one rollout's episodes, the failed ones included, and what they took."""
        episodes = [episode for episode in played if not episode.failed]
        reasons = Counter(_reason(episode) for episode in played if episode.failed)
        samples = [sample for episode in episodes for sample in episode.samples]
        return cls(
            episodes=len(episodes),
            failed=meter.episodes_failed,
            failures=dict(reasons.most_common(_REASONS_KEPT)),
            samples=len(samples),
            answered_tokens=sum(sample.trained_tokens for sample in samples),
            returns=Moments.from_values([episode.total_reward for episode in episodes]),
            contexts=Counter(episode.context_tokens for episode in episodes),
            turns=Counter(episode.turns for episode in episodes),
            context_by_turn=reduce(_added, map(_contexts_by_turn, episodes), []),
            outcomes=Counter(str(e.info["outcome"]) for e in episodes if "outcome" in e.info),
            finishes=Counter(episode.finish_reason for episode in episodes),
            environment=reduce(_added, map(_environment, episodes), {}),
            load=meter,
        )


def merge(engines: Iterable[Sequence[RolloutStats]]) -> RolloutStats:
    """One tally of what several engines played. engines: for each the tallies of its calls, in
    their order."""
    total, load = RolloutStats(), RolloutLoad()
    for calls in engines:
        counts = (tally.model_copy(update={"load": RolloutLoad()}) for tally in calls)
        total = reduce(_added, counts, total)
        load = load.beside(reduce(RolloutLoad.then, (tally.load for tally in calls), RolloutLoad()))
    return total.model_copy(update={"load": load})


def _added(one: Any, other: Any) -> Any:
    """Two numbers or sets of numbers as one; of mappings, lists and tallies part by part."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, Moments):
        return one.merge(other)
    if isinstance(one, RolloutLoad):
        return one.then(other)
    if isinstance(one, dict):
        return {key: _added(one.get(key), other.get(key)) for key in {**one, **other}}
    if isinstance(one, list):
        return [_added(*parts) for parts in zip_longest(one, other)]
    if isinstance(one, RolloutStats):
        return RolloutStats(**_added(dict(one), dict(other)))
    return one + other


def _reason(episode: Episode) -> str:
    """The last line of a traceback or of a host's log says what went wrong."""
    lines = str(episode.info.get("failure", "")).strip().splitlines() or [""]
    return f"{episode.finish_reason}: {lines[-1].strip()[:_REASON_CHARACTERS]}"


def _contexts_by_turn(episode: Episode) -> list[Pair]:
    """Tokens that stand in the sample after each turn's answer."""
    ends: list[int] = []
    for sample in episode.samples:
        ends += [*sample.turn_starts[1:], len(sample.tokens)] if sample.turn_starts else []
    return [[float(end), 1.0] for end in ends]


def _environment(episode: Episode) -> dict[str, Pair]:
    metrics = episode.info.get("metrics")
    named = metrics.items() if isinstance(metrics, dict) else ()
    return {str(name): [float(value), 1.0] for name, value in named}
