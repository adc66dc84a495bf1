"""Log-probs and entropies of chosen tokens, straight from hidden states and the head's weight.

All logits exist nowhere: a chunk of positions is computed at a time, and again in the backward
pass, which cannot be had in the forward pass because a loss of log-probs is not known there. The
last chunk's logits are kept, because the backward pass begins with it. The gradient of the head's
weight is summed over the chunks in float32 and the weight is cast once, so that the chunks change
memory and time but not the error. All that is done with a chunk's logits besides products is in
`logit_passes`, which torch.compile may fuse: each then reads and writes the logits once.

Where the head is split over the vocabulary, tensor ranks exchange a few floats for each position:
its largest logit, its sum of exponentials, its target's logit and, for entropies, one more sum
(Megatron-LM, arXiv 1909.08053). An unsplit head is the case of one part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import nn

from earl_core.learner.logit_passes import PassSettings, Slope, Sums, send_back, soft_cap, steps
from earl_core.learner.memory import positions_that_fit
from earl_core.learner.shared_rows import sum_rows

if TYPE_CHECKING:
    from earl_core.learner.parallel.vocabulary_parallel import VocabularyShard
    from earl_core.learner.target_masks import TargetMasks

_T = TypeVar("_T")

# Numbers of the weight's gradient that are computed before they are added to its sum.
_GRADIENTS_PER_STEP = 2**24


@dataclass(frozen=True)
class HeadScore(PassSettings):
    """Settings of the head's scores of tokens, beside those of the passes over logits.

    chunk_tokens: positions whose logits exist at a time; None: as memory allows. vocabulary: this
    rank's part where the head is split over ranks; the results are the whole ones. float32:
    multiply in float32 what is rounded to the dtype in which all else is multiplied, as the engine
    does with `model.float32_head`.
    """

    chunk_tokens: int | None = None
    vocabulary: VocabularyShard | None = None
    float32: bool = False

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

        logits: the head's results, transformed. head: a linear layer [vocabulary, hidden], maybe
        with a bias. states: [T, hidden]. predictors, targets: int64 [T'], rows of the states and
        tokens. masks: of the targets, in whose distributions some tokens are not. Products are in
        the weight's dtype, unless `float32`. Collective where the vocabulary is split, in the
        backward pass too.
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
        sums = Sums(len(predictors), states.device)
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
        slope = Slope.of(gradients, log_total, entropies, score)
        target = gradients[0] * inside / score.divided_by
        to_rows = _zeros(states, len(predictors), weight.shape[1])
        # A frozen head gets none.
        to_weight = _zeros(states, *weight.shape) if ctx.needs_input_grad[1] else None
        to_bias = _zeros(states, *bias.shape) if ctx.needs_input_grad[2] else None
        back = score.fused(send_back)
        for rows in reversed(chunks):
            part = logits[: rows.stop - rows.start]
            fresh = rows is not chunks[-1]
            if fresh:
                head.logits(states, predictors, rows, part)
            rounded = weight.dtype != part.dtype
            to_logits = part.new_empty(part.shape, dtype=weight.dtype) if rounded else part
            for some in steps(part, score):
                here = slice(rows.start + some.start, rows.start + some.stop)
                chosen, summed = back(
                    part[some],
                    top[here],
                    slope.rows(here),
                    place[here, None],
                    target[here, None],
                    score.divisor,
                    score.limit,
                    to_logits[some] if rounded else None,
                    fresh=fresh,
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
        """The logits of a chunk, before they are divided: float32 [n, vocabulary]."""
        multiply(self._inputs(states, predictors[rows]), self.weight.t(), out)
        if self.bias is not None:
            out += self.bias
        transform = self.score.transform
        if transform.cap is not None:
            bend = self.score.fused(soft_cap)
            for some in steps(out, self.score):
                bend(out[some], transform.scale, transform.cap)
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


def _places(
    targets: torch.Tensor, vocabulary: VocabularyShard | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each target's place among this rank's rows, 0 for another rank's, and whether it is there."""
    if vocabulary is not None:
        return vocabulary.places(targets)
    return targets, torch.ones_like(targets, dtype=torch.bool)


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
