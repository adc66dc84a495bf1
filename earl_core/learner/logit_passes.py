"""The passes over a chunk's logits, element by element: sums of exponentials, gradients, soft caps.

Each takes a few rows at a time, in place, or all of them in one kernel where it is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from earl_core.pretrained.logit_transform import NO_TRANSFORM, LogitTransform

if TYPE_CHECKING:
    from earl_core.learner.lm_head import EntropyMode
    from earl_core.learner.parallel.vocabulary_parallel import VocabularyShard

# Logits that take all element-wise steps before the next ones do: a CPU's caches hold so many, and
# a GPU's intermediate results stay small.
_LOGITS_PER_STEP, _LOGITS_PER_STEP_OF_A_GPU = 2**20, 2**26


_T = TypeVar("_T")


@dataclass(frozen=True)
class PassSettings:
    """temperature: logits are divided by it. entropy: see `EntropyMode`. compiled: fuse what is
    done element by element. transform: of the model's logits, before the temperature.
    """

    temperature: float = 1.0
    entropy: EntropyMode = "none"
    compiled: bool = field(default=False, kw_only=True)
    transform: LogitTransform = field(default=NO_TRANSFORM, kw_only=True)

    @property
    def divided_by(self) -> float:
        """What the head's results are divided by in all, where no cap bends them."""
        return self.temperature / self.transform.scale

    @property
    def divisor(self) -> float:
        """What a chunk's logits are divided by. The scale is in it, which costs no pass, but where
        a cap comes after the scale: then it is in the logits."""
        return self.divided_by if self.transform.cap is None else self.temperature

    @property
    def limit(self) -> float | None:
        """The most that divided logits can be; None: there is none."""
        cap = self.transform.cap
        return None if cap is None else cap / self.temperature

    def fused(self, function: Callable[..., _T]) -> Callable[..., _T]:
        """The function, compiled if this is so."""
        return _compiled(function) if self.compiled else function


@cache
def _compiled(function: Callable[..., _T]) -> Callable[..., _T]:
    # Where a number is a symbol, as the temperature would be, torch 2.13 computes with another one.
    exact: Callable[..., Callable[..., _T]] = torch._dynamo.config.patch(specialize_float=True)
    return exact(torch.compile(function, dynamic=True))


class Sums:
    """Sums of each position's exponentials, float32 [T'], under its largest logit `top`: `total`,
    `weighted` by the logits below it, and the `chosen` token's such logit."""

    def __init__(self, positions: int, device: torch.device) -> None:
        self.top = torch.full((positions,), -torch.inf, device=device)
        self.chosen, self.total, self.weighted = torch.zeros((3, positions), device=device)

    def add(
        self, logits: torch.Tensor, rows: slice, place: torch.Tensor, score: PassSettings
    ) -> None:
        """Take up a chunk's logits, and lower them by their largest."""
        take_up = score.fused(_take_up)
        for some in steps(logits, score):
            here = slice(rows.start + some.start, rows.start + some.stop)
            self.top[here], self.chosen[here], self.total[here], self.weighted[here] = take_up(
                logits[some], place[some, None], score.divisor, entropy=score.entropy != "none"
            )

    def exchange(self, inside: torch.Tensor, vocabulary: VocabularyShard) -> torch.Tensor:
        """Make one rank's sums those of all ranks. inside: whether the chosen token is this rank's.
        Returns how far this rank's logits lie above where they did, at most 0. Collective.
        """
        own = self.top.clone()
        vocabulary.largest(self.top)
        # Of a rank without rows it would be minus infinity.
        raised = (own - self.top).clamp_(min=-1e30)
        scale = raised.exp()
        self.weighted = (self.weighted + self.total * raised) * scale
        self.total = self.total * scale
        self.chosen = (self.chosen + raised) * inside
        exchanged = torch.stack([self.chosen, self.total, self.weighted])
        vocabulary.sum(exchanged)
        self.chosen, self.total, self.weighted = exchanged
        return raised


class Slope(NamedTuple):
    """The gradient of the logits, but for the chosen tokens' part, as a function of lowered logits
    y: exp(y) * (constant + linear * y), float32 [T'] each; linear: None where entropies send none.

    dH/dlogit = -p (log p + H), where log p = y - log of the sum of exponentials.
    """

    constant: torch.Tensor
    linear: torch.Tensor | None

    @classmethod
    def of(
        cls,
        gradients: tuple[torch.Tensor, ...],
        log_total: torch.Tensor,
        entropies: torch.Tensor,
        score: PassSettings,
    ) -> Slope:
        share = (-log_total).exp() / -score.divided_by
        if score.entropy != "differentiable":
            return cls(gradients[0] * share, None)
        towards = gradients[0] + gradients[1] * (entropies - log_total)
        return cls(towards * share, gradients[1] * share)

    def rows(self, rows: slice) -> Slope:
        """Return the slope of these positions, [n, 1]."""
        linear = None if self.linear is None else self.linear[rows, None]
        return Slope(self.constant[rows, None], linear)

    def times(self, lowered: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """The gradient [n, vocabulary] of all its positions' logits, made in `out` if given."""
        powers = torch.exp(lowered, out=out if self.linear is None else None)
        if self.linear is None:
            return powers.mul_(self.constant)
        return torch.mul(lowered, self.linear, out=out).add_(self.constant).mul_(powers)


def _take_up(
    logits: torch.Tensor, place: torch.Tensor, divisor: float, *, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lower logits [n, vocabulary] by their largest, in place; returns that and the sums of `Sums`
    [n]. place: of the chosen tokens, [n, 1]."""
    top = logits.amax(-1) / divisor
    _lower(logits, top, divisor, logits)
    chosen = logits.gather(1, place)[:, 0]
    powers = logits.exp()
    total = powers.sum(-1)
    weighted = powers.mul_(logits).sum(-1) if entropy else torch.zeros_like(total)
    return top, chosen, total, weighted


def send_back(
    logits: torch.Tensor,
    top: torch.Tensor,
    slope: Slope,
    place: torch.Tensor,
    target: torch.Tensor,
    divisor: float,
    limit: float | None,
    out: torch.Tensor | None,
    *,
    fresh: bool,
    in_place: bool,
    bias: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradient of logits [n, vocabulary], but for the chosen tokens, put into `out`, or over
    the logits if it is None; returns that of the chosen tokens [n, 1], and the bias's if wanted.

    top: of the divided logits, [n]. place, target: of the chosen tokens, and what comes to them
    besides, [n, 1]. divisor, limit: see `PassSettings`. fresh: not lowered yet. in_place: take no
    other memory of the logits' size, which costs a pass over them where this is compiled.
    """
    into = logits if in_place else None
    lowered = _lower(logits, top, divisor, into) if fresh else logits
    # d tanh(z) / dz = 1 - tanh(z)^2
    bent = None if limit is None else 1 - ((lowered + top[:, None]) / limit).square()
    found = slope.times(lowered, into)
    chosen = found.gather(1, place) + target
    if bent is not None:
        found = found.mul_(bent)
        chosen = chosen * bent.gather(1, place)
    if out is not None:
        out.copy_(found)
    summed = found.scatter_(1, place, chosen).sum(0) if bias else None
    return chosen if out is None else chosen.to(out.dtype), summed


def soft_cap(logits: torch.Tensor, scale: float, cap: float) -> None:
    """cap * tanh(scale * logits / cap), in place."""
    logits.mul_(scale / cap).tanh_().mul_(cap)


def steps(logits: torch.Tensor, score: PassSettings) -> Iterator[slice]:
    """Rows of a chunk, some at a time where each step has memory of its own."""
    numbers = _LOGITS_PER_STEP_OF_A_GPU if logits.is_cuda else _LOGITS_PER_STEP
    rows, step = len(logits), max(1, numbers // logits.shape[1])
    if score.compiled:
        step = max(1, rows)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _lower(
    logits: torch.Tensor, top: torch.Tensor, divisor: float, out: torch.Tensor | None
) -> torch.Tensor:
    """logits / divisor - top, made in `out` if given."""
    return torch.add(-top[:, None], logits, alpha=1 / divisor, out=out)
