"""A request to the torch engine while its answer grows, and the draw of its next token.

Sampling has no random state: a token is a pure function of (seed, n, logits). Uniform numbers come
from SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") used as
a counter-based generator; tokens by inverting the cumulative distribution. A token that is drawn
again from equal logits is therefore equal, in whatever batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from earl_core.pretrained.grammars import Matcher
from earl_core.rollout.engines.engine import (
    NO_DRAFTS,
    Completion,
    Drafts,
    EngineFinishReason,
    GenerationRequest,
    TopTokens,
)
from earl_core.trajectory.samples import VersionSpan


@dataclass
class Sampling:
    """budget: most tokens that may be sampled. exhausted: why it ends when they are. matcher: of
    the request's form, after the tokens that are sampled already."""

    request: GenerationRequest
    budget: int
    exhausted: Literal["length", "model_context"]
    matcher: Matcher | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[TopTokens] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish_reason: EngineFinishReason | None = None
    drafts: Drafts = NO_DRAFTS
    routing: np.ndarray | None = None

    def __post_init__(self) -> None:
        if (begun := self.request.begun) is not None:
            self.tokens, self.logprobs = [*begun.tokens], [*begun.logprobs]
            self.spans, self.top = [s for s in begun.spans if s.end], [*begun.top]
            self.drafts = begun.drafts
        if len(self.tokens) >= self.budget:
            self.finish_reason = self.exhausted

    def take(self, token: int, logprob: float) -> None:
        """Take the next token, which may end the answer."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.matcher is not None:
            self.matcher.accept(token)
        request, count = self.request, len(self.tokens)
        ended = request.ends is not None and request.ends(self.tokens, count - 1) is not None
        if ended or token in request.stop_token_ids:
            self.finish_reason = "stop"
        elif count == self.budget:
            self.finish_reason = self.exhausted

    def note_top(self, logprobs: torch.Tensor) -> None:
        """Note the most likely tokens of the next place. logprobs: float32 [vocabulary]."""
        values, tokens = logprobs.topk(min(self.request.top, len(logprobs)))
        self.top.append(list(zip(tokens.tolist(), values.tolist(), strict=True)))

    def completion(self, version: int) -> Completion:
        """The answer."""
        reason = self.finish_reason or "cancelled"
        spans, first = list(self.spans), self.spans[-1].end if self.spans else 0
        if spans and spans[-1].policy_version == version:
            first = spans.pop().first
        if first < len(self.tokens) or not spans:
            spans.append(VersionSpan(version, first, len(self.tokens)))
        return Completion(
            self.tokens, self.logprobs, reason, spans, self.top, self.drafts, self.routing
        )


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniform(seeds: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1), float64 with 52 random bits, one for each (seed, counter) of uint64.

    52 bits rather than 53, so that number * x < x holds in floating point for every x > 0.
    """
    with np.errstate(over="ignore"):
        value = _mixed(_mixed(seeds + _GOLDEN) + counters.astype(np.uint64) * _GOLDEN)
    return (value >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mixed(value: np.ndarray) -> np.ndarray:
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return np.asarray(value ^ (value >> np.uint64(31)), dtype=np.uint64)


def sample(
    logits: torch.Tensor, temperatures: np.ndarray, uniforms: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens (int64, [rows]), their log-probs (float32, [rows]) and those of all tokens (float32,
    [rows, vocabulary]).

    `logits` is [rows, vocabulary]; `temperatures` and `uniforms` are float64 [rows]. Temperature 0
    takes the first largest logit, and its log-prob is that of temperature 1.
    """
    logits = logits.float()
    greedy = torch.from_numpy(temperatures == 0.0).to(logits.device)
    divisor = torch.from_numpy(np.where(temperatures == 0.0, 1.0, temperatures).astype(np.float32))
    logprobs = torch.log_softmax(logits / divisor.to(logits.device)[:, None], dim=-1)
    # float64: over a large vocabulary a float32 sum would shift the boundaries by 1e-5.
    cumulative = torch.cumsum(logprobs.exp(), dim=-1, dtype=torch.float64)
    target = torch.from_numpy(uniforms).to(logits.device)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    tokens.clamp_max_(logits.shape[1] - 1)  # only NaN gets there; its log-prob says so
    if bool(greedy.any()):
        tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1), logprobs
