"""Peak memory of a stage under a layout, by formula, and its calibration by measured peaks.

All sizes are bytes on one device. Activations follow what a decoder layer keeps for its backward
pass with an attention kernel that stores no score matrix; `standard_activation_bytes` is the older
formula that does store it (Korthikanti et al. 2022, equation 1), kept for comparison.
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

from pydantic import Field

from earl_core.config.base import Settings
from earl_core.selector.candidates import Candidate
from earl_core.selector.shapes import DeviceFigures, ModelShape, Sizes

RUNTIME_BYTES = 2**30
"""Libraries, kernels and communication buffers of one process: an assumption."""

PREFILL_TOKENS = 8192
"""Prompt tokens that an engine computes in one pass: the engine's own default."""


class Memory(NamedTuple):
    """Where a device's memory goes, bytes."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    runtime: float = 0.0
    kv_cache: float = 0.0

    @property
    def total(self) -> float:
        """Everything together."""
        return sum(self)


class TrainingNeeds(NamedTuple):
    """What the algorithm asks of the training stages.

    mixed: bf16 autocast over float32 master weights; else all float32. trained: share of the
    parameters that has gradients and optimizer state (1 without adapters).
    """

    mixed: bool = True
    trained: float = 1.0


def standard_activation_bytes(shape: ModelShape | Sizes, tokens: int, sequences: int = 1) -> float:
    """Activations of a whole model in 16 bit with stored attention scores and no parallelism:
    s·b·h·L·(34 + 5·a·s/h), for sequences of `tokens` each (Korthikanti et al. 2022, equation 1)."""
    scores = 5 * shape.attention_heads * tokens / shape.hidden_size
    return float(tokens * sequences * shape.hidden_size * shape.layers) * (34 + scores)


def layer_activation_bytes(shape: ModelShape | Sizes, tensor: int = 1, mixed: bool = True) -> float:
    """What one token leaves in one layer for the backward pass, bytes on one device.

    Two norms (input in float32, output), two residual sums; query, key, value, attention output
    and its log-sum; four feed-forward products (two without a gate). Tensor parallel ranks share
    the last two groups.
    """
    value = 2 if mixed else 4
    shared = shape.hidden_size * (2 * (4 + value) + 2 * value)
    attention = 2 * (shape.query_size + shape.key_value_size) * value + 4 * shape.attention_heads
    products = (4 if shape.gated_mlp else 2) * shape.feed_forward * value
    return shared + (attention + products) / tensor


def training_memory(
    shape: ModelShape | Sizes, layout: Candidate, longest: float, needs: TrainingNeeds
) -> Memory:
    """Peak of one update rank. longest: tokens of the longest sample, which no microbatch cuts.

    float32 weights, gradients and two Adam moments, divided by tensor parallelism and sharding;
    working copies of the weights in bf16, or gathered layer by layer when sharded.
    """
    own = shape.parameters / (layout.tensor * layout.shard)
    value = 2 if needs.mixed else 4
    tokens = max(float(layout.microbatch), longest) / layout.context
    per_layer = layer_activation_bytes(shape, layout.tensor, needs.mixed)
    if layout.checkpointing:
        kept = shape.layers * shape.hidden_size * value + per_layer
    else:
        kept = shape.layers * per_layer
    return Memory(
        weights=4 * own + _working_bytes(shape, layout, value, needs.mixed),
        gradients=4 * own * needs.trained,
        optimizer=0.0 if layout.offload else 8 * own * needs.trained,
        activations=tokens * kept,
        logits=_logit_bytes(shape, layout, tokens, backward=True),
        runtime=RUNTIME_BYTES,
    )


def scoring_memory(
    shape: ModelShape | Sizes, layout: Candidate, longest: float, needs: TrainingNeeds
) -> Memory:
    """Peak of one rank that only scores (reference, value): a forward pass keeps no activations."""
    value = 2 if needs.mixed else 4
    tokens = max(float(layout.microbatch), longest) / layout.context
    own = value * shape.parameters / (layout.tensor * layout.shard)
    gathered = _working_bytes(shape, layout, value, mixed=False)
    return Memory(
        weights=own + gathered,
        activations=tokens * layer_activation_bytes(shape, layout.tensor, needs.mixed),
        logits=_logit_bytes(shape, layout, tokens, backward=False),
        runtime=RUNTIME_BYTES,
    )


def _working_bytes(shape: ModelShape | Sizes, layout: Candidate, value: int, mixed: bool) -> float:
    if layout.shard > 1:
        # One layer in use and the next one on its way; the largest table is gathered alone.
        largest = max(2 * shape.layer_parameters, shape.embedding_parameters)
        return value * largest / layout.tensor
    return value * shape.parameters / layout.tensor if mixed else 0.0


def _logit_bytes(
    shape: ModelShape | Sizes, layout: Candidate, tokens: float, backward: bool
) -> float:
    rows = min(tokens, layout.logits_chunk) if layout.logits_chunk else tokens
    # bf16 out of the head, float32 for the softmax, float32 for its gradient.
    return rows * shape.vocabulary * (10 if backward else 6) / layout.tensor


def engine_memory(
    shape: ModelShape | Sizes, device: DeviceFigures, layout: Candidate, kv_budget: float
) -> Memory:
    """One rank of an engine. kv_budget: GPU: share of the device that the engine may use; CPU:
    bytes set aside for keys and values. The cache gets what weights and workspace leave."""
    weights = 2.0 * shape.parameters / layout.tensor
    tokens = min(PREFILL_TOKENS, shape.max_positions)
    width = 4 * shape.hidden_size + (2 * shape.query_size + 4 * shape.feed_forward) / layout.tensor
    running = layout.running or 256
    fixed = Memory(
        weights=weights,
        activations=2.0 * tokens * width if device.kind == "gpu" else 0.0,
        # bf16 and float32 rows of the sampler.
        logits=6.0 * running * shape.vocabulary / layout.tensor,
        runtime=float(RUNTIME_BYTES),
    )
    if device.kind == "cpu":
        return fixed._replace(kv_cache=kv_budget)
    return fixed._replace(kv_cache=max(0.0, kv_budget * device.memory_bytes - fixed.total))


def kv_bytes_per_token(shape: ModelShape | Sizes, tensor: int) -> float:
    """Keys and values of one token on one rank; heads beyond the model's are copies."""
    return shape.kv_bytes_per_token() / min(tensor, shape.key_value_heads)


def kv_capacity_tokens(shape: ModelShape | Sizes, memory: Memory, tensor: int) -> float:
    """Tokens that one engine's cache holds."""
    return memory.kv_cache / kv_bytes_per_token(shape, tensor)


class Peak(Settings):
    """One measured peak beside what the formula said, bytes on one device."""

    stage: str
    predicted: float = Field(gt=0)
    measured: float = Field(gt=0)
    out_of_memory: bool = Field(
        default=False, description="The measured bytes were not enough: the true peak is above."
    )


_REMEMBERED = 64
_OOM_MARGIN = 1.02


class Calibration(Settings):
    """Corrects the formula by what was measured, stage by stage, without losing its order.

    With peaks at different sizes the correction is measured = a + b · predicted, b between 1/2
    and 3, by least squares of relative errors, and at least a quarter of the prediction; with one
    size only, a factor. Never measured: 1.
    """

    peaks: tuple[Peak, ...] = ()

    def observe(self, peak: Peak) -> Calibration:
        """With one more measurement; the oldest are forgotten."""
        return Calibration(peaks=(*self.peaks, peak)[-_REMEMBERED:])

    def correct(self, stage: str, predicted: float) -> float:
        """The calibrated peak. Never decreases as `predicted` grows."""
        return self.corrector(stage)(predicted)

    def corrector(self, stage: str) -> _Corrector:
        """The stage's correction, worked out once for many candidates."""
        return _Corrector([peak for peak in self.peaks if peak.stage == stage])


class _Corrector:
    def __init__(self, peaks: list[Peak]) -> None:
        self._offset, self._slope = _line([p for p in peaks if not p.out_of_memory])
        failed = sorted((p.predicted, p.measured * _OOM_MARGIN) for p in peaks if p.out_of_memory)
        self._failed = [predicted for predicted, _ in failed]
        self._floors: list[float] = []
        for _, floor in failed:
            self._floors.append(max([floor, *self._floors[-1:]]))

    def __call__(self, predicted: float) -> float:
        # A steep line has a negative offset, which must not make small layouts free of charge.
        value = max(self._offset + self._slope * predicted, predicted / 4)
        # What once ran out of memory needs more than there was, and so does all that is larger.
        place = bisect.bisect_right(self._failed, predicted * (1 + 1e-9))
        return max(value, self._floors[place - 1]) if place else value


def _line(peaks: list[Peak]) -> tuple[float, float]:
    if not peaks:
        return 0.0, 1.0
    factor = sum(p.measured / p.predicted for p in peaks) / len(peaks)
    sizes = [p.predicted for p in peaks]
    if max(sizes) < 1.1 * min(sizes):
        return 0.0, factor
    weights = [1.0 / p.measured**2 for p in peaks]
    total = sum(weights)
    mean_x = sum(w * p.predicted for w, p in zip(weights, peaks, strict=True)) / total
    mean_y = sum(w * p.measured for w, p in zip(weights, peaks, strict=True)) / total
    spread = sum(w * (p.predicted - mean_x) ** 2 for w, p in zip(weights, peaks, strict=True))
    joint = sum(
        w * (p.predicted - mean_x) * (p.measured - mean_y)
        for w, p in zip(weights, peaks, strict=True)
    )
    slope = min(3.0, max(0.5, joint / spread))
    return mean_y - slope * mean_x, slope
