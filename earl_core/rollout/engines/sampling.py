"""A request to the torch engine while its answer grows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from earl_core.rollout.engines.engine import (
    Completion,
    EngineFinishReason,
    GenerationRequest,
    TopTokens,
)
from earl_core.trajectory.samples import VersionSpan


@dataclass
class Sampling:
    """budget: most tokens that may be sampled. exhausted: why it ends when they are."""

    request: GenerationRequest
    budget: int
    exhausted: Literal["length", "model_context"]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[TopTokens] = field(default_factory=list)
    finish_reason: EngineFinishReason | None = None

    def take(self, token: int, logprob: float) -> None:
        """Take the next token, which may end the answer."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
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
        spans = [VersionSpan(version, 0, len(self.tokens))]
        return Completion(self.tokens, self.logprobs, reason, spans, self.top)
