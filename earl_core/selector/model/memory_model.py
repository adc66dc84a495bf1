"""Peak memory of a stage under a layout, by formula, and its calibration by measured peaks.

All sizes are bytes on one device. Activations follow what a decoder layer keeps for its backward
pass with an attention kernel that stores no score matrix; `standard_activation_bytes` is the older
formula that does store it (Korthikanti et al. 2022, equation 1), kept for comparison.
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

from pydantic import Field

from earl_core.config.settings import Settings
from earl_core.deployment.shapes import DeviceFigures, ModelShape, Sizes
from earl_core.selector.model.candidates import Candidate

RUNTIME_BYTES = 2**30
"""Libraries, kernels and communication buffers of one process: an assumption."""

CPU_RUNTIME_BYTES = 0.52 * 2**30
"""Libraries of a process that computes on a CPU, measured; other processes share a part of it."""

CPU_ENGINE_BYTES = 0.57 * 2**30
"""The same for a process with an engine."""

CPU_VLLM_BYTES = 0.83 * 2**30
"""The same for each of vLLM's processes on a CPU: two for an engine and one for each rank."""

PREFILL_TOKENS = 8192
"""Prompt tokens that an engine computes in one pass: the engine's own default."""

LOGITS_AT_A_TIME = 2**25
"""Logits that the learner computes at a time (`LOGITS_PER_CHUNK`) where a layout says nothing."""

SHORT_TOKENS = 128
"""Samples up to this length have their attention scores stored on a CPU."""

MASK_ELEMENTS = 2**26
"""Numbers in the attention mask of the torch engine, at most."""


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
    parameters that has gradients and optimizer state (1 without adapters). cpu: on a CPU, whose
    formula counts every tensor that autograd keeps there. answered: share of the tokens that the
    policy wrote, the only ones with logits.
    """

    mixed: bool = True
    trained: float = 1.0
    cpu: bool = False
    answered: float = 1.0


def standard_activation_bytes(shape: ModelShape | Sizes, tokens: int, sequences: int = 1) -> float:
    """Activations of a whole model in 16 bit with stored attention scores and no parallelism:
    s·b·h·L·(34 + 5·a·s/h), for sequences of `tokens` each (Korthikanti et al. 2022, equation 1)."""
    scores = 5 * shape.attention_heads * tokens / shape.hidden_size
    return float(tokens * sequences * shape.hidden_size * shape.layers) * (34 + scores)


def layer_activation_bytes(shape: ModelShape | Sizes, tensor: int = 1, mixed: bool = True) -> float:
    """What one token leaves in one layer for the backward pass, bytes on one device.

    Two norms; query, key, value, attention output and its log-sum; four feed-forward products (two
    without a gate). Tensor parallel ranks share the last two groups.
    """
    value = 2 if mixed else 4
    shared = _norm_bytes(shape, mixed)
    attention = 2 * (shape.query_size + shape.key_value_size) * value + 4 * shape.attention_heads
    products = (4 if shape.gated_mlp else 2) * shape.feed_forward * value
    return shared + (attention + products) / tensor


def _norm_bytes(shape: ModelShape | Sizes, mixed: bool) -> int:
    """What the two norms of a layer keep of a token, whose residual sums are float32 also under
    autocast: input and normalised input, and what the matrices read. Under bf16 autocast each of
    five matrices keeps a copy of its own; otherwise they share the norm's output."""
    return shape.hidden_size * (2 * (4 + 4) + (5 * 2 if mixed else 2 * 4))


def cpu_layer_activation_bytes(
    shape: ModelShape | Sizes, longest: float, mixed: bool = True
) -> float:
    """The same on a CPU, with what its attention kernels keep. longest: of a sample, tokens."""
    value = 2 if mixed else 4
    norms = _norm_bytes(shape, mixed)
    wide = shape.query_size + shape.key_value_size
    if longest <= SHORT_TOKENS:
        attention = 4 * (wide + shape.key_value_size) + 4 * shape.attention_heads * longest
    else:
        attention = 2 * value * wide + 4 * shape.attention_heads
    products = (4 if shape.gated_mlp else 2) * shape.feed_forward * value
    return norms + attention + value * shape.query_size + products


def training_memory(
    shape: ModelShape | Sizes, layout: Candidate, longest: float, needs: TrainingNeeds
) -> Memory:
    """Peak of one update rank. longest: tokens of the longest sample, which no microbatch cuts.

    float32 weights, gradients and two Adam moments, divided by tensor, shard and context ranks;
    copies of the weights in bf16, and those gathered layer by layer when sharded.
    """
    own = shape.parameters / (layout.tensor * layout.parts)
    tokens = max(float(layout.microbatch), longest) / layout.context
    copies = _copied_bytes(shape, layout, needs.mixed)
    if needs.cpu:
        per_layer = cpu_layer_activation_bytes(shape, longest, needs.mixed)
        kept = _cpu_kept(shape, layout, per_layer, needs.mixed)
    else:
        per_layer = layer_activation_bytes(shape, layout.tensor, needs.mixed)
        kept = shape.layers * per_layer
        if layout.checkpointing:
            # Residual sums between layers are float32; a layer is computed again once autocast has
            # dropped its copies.
            kept = 4 * shape.layers * shape.hidden_size + per_layer
            copies = max(0.0, copies - tokens * per_layer)
    return Memory(
        weights=4 * own + copies + _gathered_bytes(shape, layout),
        gradients=4 * own * needs.trained,
        optimizer=0.0 if layout.offload else 8 * own * needs.trained,
        activations=tokens * kept,
        logits=_logit_bytes(shape, layout, tokens * needs.answered, needs.cpu, backward=True),
        runtime=CPU_RUNTIME_BYTES if needs.cpu else RUNTIME_BYTES,
    )


def _cpu_kept(shape: ModelShape | Sizes, layout: Candidate, per_layer: float, mixed: bool) -> float:
    """Bytes a token when the backward pass begins, and what it has under way.

    Between layers stand residual sums in float32. How many layers' worth of gradients and
    intermediate results are under way besides is measured, with a layer that is computed again
    and without: the only constants here that are not counted.
    """
    if layout.checkpointing:
        return 4 * shape.layers * shape.hidden_size + (3.5 if mixed else 4.0) * per_layer
    return (shape.layers + (2.5 if mixed else 1.5)) * per_layer


def scoring_memory(
    shape: ModelShape | Sizes, layout: Candidate, longest: float, needs: TrainingNeeds
) -> Memory:
    """Peak of one rank that only scores (reference, value): float32 weights, and a forward pass
    that keeps no activations."""
    value = 2 if needs.mixed else 4
    tokens = max(float(layout.microbatch), longest) / layout.context
    own = 4 * shape.parameters / (layout.tensor * layout.parts)
    per_layer: float
    if needs.cpu:
        # Sums, norms and what the matrices read; queries and keys before and after they are
        # turned; four feed-forward products.
        wide = shape.query_size + shape.key_value_size
        per_layer = 26 * shape.hidden_size + 8 * wide + 4 * shape.feed_forward * value
    else:
        per_layer = layer_activation_bytes(shape, layout.tensor, needs.mixed)
    return Memory(
        weights=own + _copied_bytes(shape, layout, needs.mixed) + _gathered_bytes(shape, layout),
        activations=tokens * per_layer,
        logits=_logit_bytes(shape, layout, tokens * needs.answered, needs.cpu, backward=False),
        runtime=CPU_RUNTIME_BYTES if needs.cpu else RUNTIME_BYTES,
    )


def _copied_bytes(shape: ModelShape | Sizes, layout: Candidate, mixed: bool) -> float:
    """The bf16 copies that autocast makes of all weights that a rank computes with, its own or
    gathered: they live until the forward pass ends, where autograd needs them until it is back."""
    return 2 * shape.parameters / layout.tensor if mixed else 0.0


def _gathered_bytes(shape: ModelShape | Sizes, layout: Candidate) -> float:
    """Parameters of other ranks, gathered in float32 as they are stored."""
    if layout.parts == 1:
        return 0.0
    # One layer in use and the next one on its way; the largest table is gathered alone.
    largest = max(2 * shape.layer_parameters, shape.embedding_parameters)
    return 4 * largest / layout.tensor


def _logit_bytes(
    shape: ModelShape | Sizes, layout: Candidate, answers: float, cpu: bool, backward: bool
) -> float:
    width = shape.vocabulary / layout.tensor
    at_a_time = layout.logits_chunk or max(1.0, LOGITS_AT_A_TIME // width)
    rows = min(answers, at_a_time)
    if not cpu:
        # bf16 out of the head, float32 for the softmax, float32 for its gradient.
        return rows * width * (10 if backward else 6)
    if not backward:
        return 12 * rows * width
    # The head's gradient, in the dtype of its product and in float32; with several chunks each
    # computes the head's copy again, and their gradients meet before they are added up.
    head = width * shape.hidden_size * (20 if answers > at_a_time else 7)
    return 8 * rows * width + head


def engine_memory(
    shape: ModelShape | Sizes,
    device: DeviceFigures,
    layout: Candidate,
    kv_budget: float,
    value: int = 2,
) -> Memory:
    """One rank of a vLLM engine. kv_budget: GPU: share of the device that the engine may use; CPU:
    bytes set aside for keys and values. The cache gets what weights and workspace leave. value:
    bytes of a number in the engine's dtype."""
    weights = float(value) * shape.parameters / layout.tensor
    tokens = min(PREFILL_TOKENS, shape.max_positions)
    width = 4 * shape.hidden_size + (2 * shape.query_size + 4 * shape.feed_forward) / layout.tensor
    running = layout.running or 256
    fixed = Memory(
        weights=weights,
        activations=float(value) * tokens * width,
        # Rows of the sampler in the engine's dtype and in float32.
        logits=(4.0 + value) * running * shape.vocabulary / layout.tensor,
        runtime=float(RUNTIME_BYTES),
    )
    if device.kind == "cpu":
        runtime = CPU_VLLM_BYTES * (1 + 2 / layout.tensor)
        return fixed._replace(runtime=runtime, kv_cache=kv_budget)
    return fixed._replace(kv_cache=max(0.0, kv_budget * device.memory_bytes - fixed.total))


def torch_engine_memory(
    shape: ModelShape | Sizes, sequences: float, longest: float, value: int, cpu: bool
) -> Memory:
    """The torch engine, whose cache grows with what it holds. sequences: in play at a time.
    longest: tokens of the longest. value: bytes of a number in the engine's dtype.

    Every sequence has a row as wide as the longest. The cache grows a quarter ahead, and what
    grows or is read of it is there twice for a moment: measured, half as much again.
    """
    tokens = min(float(PREFILL_TOKENS), sequences * longest)
    width = shape.hidden_size * (8 + value) + 3 * shape.feed_forward * value
    # The mask as numbers, and as the bits that it is made from.
    mask = min(float(MASK_ELEMENTS), tokens * longest) * (value + 1)
    return Memory(
        weights=float(value) * shape.parameters,
        activations=tokens * width + mask,
        # Logits, two softmaxes, and the cumulated probabilities in float64.
        logits=sequences * shape.vocabulary * (16.0 + value),
        runtime=CPU_ENGINE_BYTES if cpu else RUNTIME_BYTES,
        kv_cache=1.5 * sequences * longest * kv_bytes_per_token(shape, 1, value),
    )


def kv_bytes_per_token(shape: ModelShape | Sizes, tensor: int, value: int = 2) -> float:
    """Keys and values of one token on one rank; heads beyond the model's are copies."""
    return shape.kv_bytes_per_token() * value / 2 / min(tensor, shape.key_value_heads)


def kv_capacity_tokens(
    shape: ModelShape | Sizes, memory: Memory, tensor: int, value: int = 2
) -> float:
    """Tokens that one engine's cache holds."""
    return memory.kv_cache / kv_bytes_per_token(shape, tensor, value)


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
