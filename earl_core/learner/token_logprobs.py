"""Log-probs and entropies of chosen tokens, straight from hidden states and the head's weight.

All logits exist nowhere: a chunk of positions is computed at a time, and again in the backward
pass, which cannot be had in the forward pass because a loss of log-probs is not known there. The
last chunk's logits are kept, because the backward pass begins with it. The gradient of the head's
weight is summed over the chunks in float32 and the weight is cast once, so that the chunks change
memory and time but not the error. All that is done with a chunk's logits besides products is in two
functions, which torch.compile may fuse: each then reads and writes the logits once.

Where the head is split over the vocabulary, tensor ranks exchange a few floats for each position:
its largest logit, its sum of exponentials, its target's logit and, for entropies, one more sum
(Megatron-LM, arXiv 1909.08053). An unsplit head is the case of one part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import nn

from earl_core.learner.memory import positions_that_fit
from earl_core.learner.shared_rows import sum_rows

if TYPE_CHECKING:
    from earl_core.learner.lm_head import EntropyMode
    from earl_core.learner.parallel.vocabulary_parallel import VocabularyShard
    from earl_core.learner.target_masks import TargetMasks

_T = TypeVar("_T")

# Logits that take all element-wise steps before the next ones do: a CPU's caches hold so many, and
# a GPU's intermediate results stay small.
_LOGITS_PER_STEP, _LOGITS_PER_STEP_OF_A_GPU = 2**20, 2**26
# Numbers of the weight's gradient that are computed before they are added to its sum.
_GRADIENTS_PER_STEP = 2**24


@dataclass(frozen=True)
class HeadScore:
    """Settings of the head's scores of tokens.

    temperature: logits are divided by it. entropy: see `EntropyMode`. chunk_tokens: positions whose
    logits exist at a time; None: as memory allows. vocabulary: this rank's part where the head is
    split over ranks; the results are the whole ones. float32: multiply in float32 what is rounded
    to the dtype in which all else is multiplied, as the engine does with `model.float32_head`.
    compiled: fuse what is done element by element.
    """

    temperature: float = 1.0
    entropy: EntropyMode = "none"
    chunk_tokens: int | None = None
    vocabulary: VocabularyShard | None = None
    float32: bool = False
    compiled: bool = False

    def __call__(
        self,
        head: nn.Module,
        states: torch.Tensor,
        predictors: torch.Tensor,
        targets: torch.Tensor,
        masks: TargetMasks | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs, and entropies or None, of targets [T'] under softmax(logits / temperature);
        float32 [T'].

        head: a linear layer [vocabulary, hidden], maybe with a bias. states: [T, hidden].
        predictors, targets: int64 [T'], rows of the states and tokens. masks: of the targets, in
        whose distributions some tokens are not. Products are in the weight's dtype, unless
        `float32`. Collective where the vocabulary is split, in the backward pass too.
        """
        weight = cast(torch.Tensor, head.weight)
        bias = cast("torch.Tensor | None", getattr(head, "bias", None))
        if self.vocabulary is not None:
            weight = self.vocabulary.local(weight)
            bias = None if bias is None else self.vocabulary.local(bias)
        logprobs, entropies = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
            states, weight, bias, predictors, targets, self, masks
        )
        return logprobs, None if self.entropy == "none" else entropies

    def fused(self, function: Callable[..., _T]) -> Callable[..., _T]:
        """The function, compiled if this is so."""
        return _compiled(function) if self.compiled else function

    def chunks(self, positions: int, width: int, device: torch.device) -> list[slice]:
        """The positions of each chunk, as even as can be."""
        most = self.chunk_tokens or positions_that_fit(width, device)
        count = -(-positions // most)
        return [
            slice(index * positions // count, (index + 1) * positions // count)
            for index in range(count)
        ]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        predictors: torch.Tensor,
        targets: torch.Tensor,
        score: HeadScore,
        masks: TargetMasks | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        head = _Head(weight.float() if score.float32 else weight, bias, score, masks)
        width = score.vocabulary.most if score.vocabulary is not None else len(weight)
        # A rank without rows has nothing to compute.
        chunks = score.chunks(len(predictors), width, states.device) if len(weight) else []
        logits = torch.empty(
            max((rows.stop - rows.start for rows in chunks), default=0),
            len(weight),
            dtype=torch.float32,
            device=states.device,
        )
        place, inside = _places(targets, score.vocabulary)
        sums = _Sums(len(predictors), states.device)
        for rows in chunks:
            part = logits[: rows.stop - rows.start]
            head.logits(states, predictors, rows, part)
            sums.add(part, rows, place[rows], score)
        if score.vocabulary is not None:
            raised = sums.exchange(inside, score.vocabulary)
            if chunks:
                # The last chunk's logits, like all to come, lie below the largest of all ranks.
                part.add_(raised[chunks[-1], None])
        log_total = sums.total.log()
        logprobs = sums.chosen - log_total
        entropies = logprobs.clone()
        if score.entropy != "none":
            entropies = log_total - sums.weighted / sums.total
        if score.entropy != "differentiable":
            ctx.mark_non_differentiable(entropies)
        ctx.score, ctx.chunks, ctx.masks = score, chunks, masks
        ctx.save_for_backward(
            states, head.weight, bias, predictors, place, inside, sums.top, log_total, entropies,
            logits,
        )  # fmt: skip
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, weight, bias, predictors, place, inside, top, log_total, entropies, logits = (
            ctx.saved_tensors
        )
        score, chunks = ctx.score, ctx.chunks
        head = _Head(weight, bias, score, ctx.masks)
        slope = _Slope.of(gradients, log_total, entropies, score)
        target = gradients[0] * inside / score.temperature
        to_rows = _zeros(states, len(predictors), weight.shape[1])
        # A frozen head gets none.
        to_weight = _zeros(states, *weight.shape) if ctx.needs_input_grad[1] else None
        to_bias = _zeros(states, *bias.shape) if ctx.needs_input_grad[2] else None
        send_back = score.fused(_send_back)
        for rows in reversed(chunks):
            part = logits[: rows.stop - rows.start]
            fresh = rows is not chunks[-1]
            if fresh:
                head.logits(states, predictors, rows, part)
            rounded = weight.dtype != part.dtype
            to_logits = part.new_empty(part.shape, dtype=weight.dtype) if rounded else part
            for some in _steps(part, score):
                here = slice(rows.start + some.start, rows.start + some.stop)
                chosen, summed = send_back(
                    part[some],
                    top[here] if fresh else None,
                    slope.rows(here),
                    place[here, None],
                    target[here, None],
                    score.temperature,
                    to_logits[some] if rounded else None,
                    in_place=not (rounded and score.compiled),
                    bias=to_bias is not None,
                )
                to_logits[some].scatter_(1, place[here, None], chosen)
                if to_bias is not None:
                    to_bias += summed
            multiply(to_logits, weight, to_rows[rows])
            if to_weight is not None:
                head.add_gradient(to_weight, to_logits, states, predictors[rows])
        if score.vocabulary is not None:
            score.vocabulary.sum(to_rows)
        to_states = sum_rows(to_rows, predictors, len(states)).to(states.dtype)
        return to_states, to_weight, to_bias, None, None, None, None


class _Head(NamedTuple):
    """The weight [vocabulary, hidden] in the dtype of its products."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    score: HeadScore
    masks: TargetMasks | None

    def logits(
        self, states: torch.Tensor, predictors: torch.Tensor, rows: slice, out: torch.Tensor
    ) -> None:
        """The logits of a chunk, before the temperature: float32 [n, vocabulary]."""
        multiply(self._inputs(states, predictors[rows]), self.weight.t(), out)
        if self.bias is not None:
            out += self.bias
        if self.masks is not None:
            shard = self.score.vocabulary
            self.masks.apply(out, rows, 0 if shard is None else shard.start)

    def add_gradient(
        self, total: torch.Tensor, to_logits: torch.Tensor, states: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """Add a chunk's part of the weight's gradient to its float32 sum."""
        inputs = self._inputs(states, rows)
        step = max(1, _GRADIENTS_PER_STEP // inputs.shape[1])
        parts = torch.split(total, step), torch.split(to_logits, step, dim=1)
        for some, gradients in zip(*parts, strict=True):
            if inputs.dtype == total.dtype:
                some.addmm_(gradients.t(), inputs)
            elif inputs.is_cuda:
                some += torch.mm(gradients.t(), inputs, out_dtype=total.dtype)
            else:
                some += gradients.t() @ inputs

    def _inputs(self, states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return states.index_select(0, rows).to(self.weight.dtype)


class _Sums:
    """Sums of each position's exponentials, float32 [T'], under its largest logit `top`: `total`,
    `weighted` by the logits below it, and the `chosen` token's such logit."""

    def __init__(self, positions: int, device: torch.device) -> None:
        self.top = torch.full((positions,), -torch.inf, device=device)
        self.chosen, self.total, self.weighted = torch.zeros((3, positions), device=device)

    def add(self, logits: torch.Tensor, rows: slice, place: torch.Tensor, score: HeadScore) -> None:
        """Take up a chunk's logits, and lower them by their largest."""
        take_up = score.fused(_take_up)
        for some in _steps(logits, score):
            here = slice(rows.start + some.start, rows.start + some.stop)
            self.top[here], self.chosen[here], self.total[here], self.weighted[here] = take_up(
                logits[some], place[some, None], score.temperature, entropy=score.entropy != "none"
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


class _Slope(NamedTuple):
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
        score: HeadScore,
    ) -> _Slope:
        share = (-log_total).exp() / -score.temperature
        if score.entropy != "differentiable":
            return cls(gradients[0] * share, None)
        towards = gradients[0] + gradients[1] * (entropies - log_total)
        return cls(towards * share, gradients[1] * share)

    def rows(self, rows: slice) -> _Slope:
        """Return the slope of these positions, [n, 1]."""
        linear = None if self.linear is None else self.linear[rows, None]
        return _Slope(self.constant[rows, None], linear)

    def times(self, lowered: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """The gradient [n, vocabulary] of all its positions' logits, made in `out` if given."""
        powers = torch.exp(lowered, out=out if self.linear is None else None)
        if self.linear is None:
            return powers.mul_(self.constant)
        return torch.mul(lowered, self.linear, out=out).add_(self.constant).mul_(powers)


def _take_up(
    logits: torch.Tensor, place: torch.Tensor, temperature: float, *, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lower logits [n, vocabulary] by their largest, in place; returns that and the sums of `_Sums`
    [n]. place: of the chosen tokens, [n, 1]."""
    top = logits.amax(-1) / temperature
    _lower(logits, top, temperature, logits)
    chosen = logits.gather(1, place)[:, 0]
    powers = logits.exp()
    total = powers.sum(-1)
    weighted = powers.mul_(logits).sum(-1) if entropy else torch.zeros_like(total)
    return top, chosen, total, weighted


def _send_back(
    logits: torch.Tensor,
    top: torch.Tensor | None,
    slope: _Slope,
    place: torch.Tensor,
    target: torch.Tensor,
    temperature: float,
    out: torch.Tensor | None,
    *,
    in_place: bool,
    bias: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradient of logits [n, vocabulary], but for the chosen tokens, put into `out`, or over
    the logits if it is None; returns that of the chosen tokens [n, 1], and the bias's if wanted.

    top: None where they are lowered already. place, target: of the chosen tokens, and what comes to
    them besides, [n, 1]. in_place: take no other memory of the logits' size, which costs a pass
    over them where this is compiled.
    """
    into = logits if in_place else None
    lowered = logits if top is None else _lower(logits, top, temperature, into)
    found = slope.times(lowered, into)
    chosen = found.gather(1, place) + target
    if out is not None:
        out.copy_(found)
    summed = found.scatter_(1, place, chosen).sum(0) if bias else None
    return chosen if out is None else chosen.to(out.dtype), summed


@cache
def _compiled(function: Callable[..., _T]) -> Callable[..., _T]:
    # Where a number is a symbol, as the temperature would be, torch 2.13 computes with another one.
    exact: Callable[..., Callable[..., _T]] = torch._dynamo.config.patch(specialize_float=True)
    return exact(torch.compile(function, dynamic=True))


def _places(
    targets: torch.Tensor, vocabulary: VocabularyShard | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each target's place among this rank's rows, 0 for another rank's, and whether it is there."""
    if vocabulary is not None:
        return vocabulary.places(targets)
    return targets, torch.ones_like(targets, dtype=torch.bool)


def _steps(logits: torch.Tensor, score: HeadScore) -> Iterator[slice]:
    """Rows of a chunk, some at a time where each step has memory of its own."""
    numbers = _LOGITS_PER_STEP_OF_A_GPU if logits.is_cuda else _LOGITS_PER_STEP
    rows, step = len(logits), max(1, numbers // logits.shape[1])
    if score.compiled:
        step = max(1, rows)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _lower(
    logits: torch.Tensor, top: torch.Tensor, temperature: float, out: torch.Tensor | None
) -> torch.Tensor:
    """logits / temperature - top, made in `out` if given."""
    return torch.add(-top[:, None], logits, alpha=1 / temperature, out=out)


def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """The product in float32; a CPU rounds one of 16 bits to those first."""
    if left.dtype == out.dtype:
        torch.mm(left, right, out=out)
    elif left.is_cuda:
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        out.copy_(left @ right)


def _zeros(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return like.new_zeros(shape, dtype=torch.float32)
