"""Peak memory of a stage under a stage deployment: by formula, corrected by measured peaks.

Formulas that hold only on a CPU are in `cpu`. All sizes are bytes on one device. Activations follow
what a decoder layer keeps for its backward pass with an attention kernel that stores no score
matrix; `standard_activation_bytes` is the older formula that does store it (Korthikanti et al.
2022, equation 1), kept for comparison.
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

import numpy as np
from pydantic import Field

from earl_core.cluster.stage_deployment import StageDeployment
from earl_core.config.rollout import VllmConfig
from earl_core.config.settings import Settings
from earl_core.deployment.shapes import DeviceFigures, Hardware, ModelShape
from earl_core.selector.model.sizes import BYTES_PER_LOGIT, positions_at_a_time


class Peak(Settings):
    """One measured peak beside what the formula said, bytes on one device."""

    stage: str
    predicted: float = Field(gt=0)
    measured: float = Field(gt=0)
    out_of_memory: bool = Field(
        default=False, description="The measured bytes were not enough: the true peak is above."
    )


_OOM_MARGIN = 1.02


class Calibration(Settings):
    """Corrects the formula by what was measured, stage by stage, without losing its order.

    With peaks at different sizes the correction is measured = a + b · predicted, b between 1/2
    and 3, by least squares of relative errors, and at least a quarter of the prediction; with one
    size only, a factor. Never measured: 1.
    """

    peaks: tuple[Peak, ...] = ()

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
        # A steep line has a negative offset, which must not make small candidates free of charge.
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
    measured = np.array([p.measured for p in peaks])
    slope, _ = np.polyfit(sizes, measured, 1, w=1 / measured)
    slope = min(3.0, max(0.5, float(slope)))
    offset = np.average(measured - slope * np.array(sizes), weights=measured**-2)
    return float(offset), slope


RUNTIME_BYTES = 2**30
"""Libraries, kernels and communication buffers of one process: an assumption."""

PREFILL_TOKENS = 8192
"""Prompt tokens that an engine computes in one pass: the engine's own default."""

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

    mixed: bf16 over float32 master weights, counted as under autocast, which keeps more than the
    learner does (docs/selector.md); else all float32. trained: share of the
    parameters that has gradients and optimizer state (1 without adapters). answered: share of the
    tokens that the policy wrote, the only ones with logits.
    """

    mixed: bool = True
    trained: float = 1.0
    answered: float = 1.0


class MemoryModel:
    """Of one GPU. shared: whether all ranks of a host share one memory, so that theirs add up."""

    shared = False
    runtime = engine_runtime = float(RUNTIME_BYTES)

    def __init__(self, shape: ModelShape, device: DeviceFigures, hardware: Hardware) -> None:
        self.shape, self.device, self.hardware = shape, device, hardware

    def budget(self, fraction: float, reserved: float) -> float:
        """Bytes that a stage may use: of one device, or of the host that its ranks share, what
        others hold (reserved) taken off."""
        return fraction * self.device.memory_bytes

    def short_of(self, peak: float, budget: float, reserved: float) -> str:
        """Such as `needs 3.0 GiB, but only 2.0 GiB are available on a device`."""
        return f"needs {gib(peak)}, but only {gib(budget)} are available on a device"

    def training(self, candidate: StageDeployment, longest: float, needs: TrainingNeeds) -> Memory:
        """Peak of one update rank. longest: tokens of the longest sample, which no microbatch cuts.

        float32 weights, gradients and two Adam moments, divided by tensor, shard and context ranks;
        copies of the weights in bf16, and those gathered layer by layer when sharded.
        """
        own = self.shape.parameters / (candidate.tensor_parallel * candidate.parts)
        tokens = _tokens(candidate, longest)
        kept, dropped = self._kept(candidate, longest, needs.mixed)
        copies = max(0.0, self._copied(candidate, needs.mixed) - tokens * dropped)
        return Memory(
            weights=4 * own + copies + self._gathered(candidate),
            gradients=4 * own * needs.trained,
            optimizer=0.0 if candidate.offload_optimizer else 8 * own * needs.trained,
            activations=tokens * kept,
            logits=self._logits_of(candidate, tokens * needs.answered, backward=True),
            runtime=self.runtime,
        )

    def scoring(self, candidate: StageDeployment, longest: float, needs: TrainingNeeds) -> Memory:
        """Peak of one rank that only scores (reference, value): float32 weights, and a forward pass
        that keeps no activations."""
        tokens = _tokens(candidate, longest)
        own = 4 * self.shape.parameters / (candidate.tensor_parallel * candidate.parts)
        copies = self._copied(candidate, needs.mixed)
        return Memory(
            weights=own + copies + self._gathered(candidate),
            activations=tokens * self._scored(candidate, needs.mixed),
            logits=self._logits_of(candidate, tokens * needs.answered, backward=False),
            runtime=self.runtime,
        )

    def vllm(self, candidate: StageDeployment, settings: VllmConfig, value: int = 2) -> Memory:
        """One rank of a vLLM engine; the cache gets what weights and workspace leave of the share
        that it is given. value: bytes of a number in the engine's dtype."""
        shape, tensor = self.shape, candidate.tensor_parallel
        tokens = min(PREFILL_TOKENS, shape.max_positions)
        width = 4 * shape.hidden_size + (2 * shape.query_size + 4 * shape.feed_forward) / tensor
        running = candidate.max_running_requests or 256
        fixed = Memory(
            weights=float(value) * shape.parameters / tensor,
            activations=float(value) * tokens * width,
            # Rows of the sampler in the engine's dtype and in float32.
            logits=(4.0 + value) * running * shape.vocabulary / tensor,
            runtime=self.runtime,
        )
        return self._with_cache(fixed, candidate, settings)

    def torch_engine(self, sequences: float, longest: float, value: int) -> Memory:
        """The torch engine, whose cache grows with what it holds. sequences: in play at a time.
        longest: tokens of the longest. value: bytes of a number in the engine's dtype.

        Every sequence has a row as wide as the longest. The cache grows a quarter ahead, and what
        grows or is read of it is there twice for a moment: measured, half as much again.
        """
        shape = self.shape
        tokens = min(float(PREFILL_TOKENS), sequences * longest)
        width = shape.hidden_size * (8 + value) + 3 * shape.feed_forward * value
        # The mask as numbers, and as the bits that it is made from.
        mask = min(float(MASK_ELEMENTS), tokens * longest) * (value + 1)
        return Memory(
            weights=float(value) * shape.parameters,
            activations=tokens * width + mask,
            # Logits, two softmaxes, and the cumulated probabilities in float64.
            logits=sequences * shape.vocabulary * (16.0 + value),
            runtime=self.engine_runtime,
            kv_cache=1.5 * sequences * longest * kv_bytes_per_token(shape, 1, value),
        )

    def _kept(self, candidate: StageDeployment, longest: float, mixed: bool) -> tuple[float, float]:
        """Bytes that each token leaves for the backward pass, and those of autocast's copies that
        are dropped before it needs them."""
        shape = self.shape
        per_layer = layer_activation_bytes(shape, candidate.tensor_parallel, mixed)
        if candidate.activation_checkpointing == "none":
            return shape.layers * per_layer, 0.0
        if candidate.activation_checkpointing == "selective":
            kept = selective_layer_bytes(shape, candidate.tensor_parallel, mixed)
            return shape.layers * kept + per_layer, per_layer
        # Residual sums between layers are float32; a layer is computed again once autocast has
        # dropped its copies.
        return 4 * shape.layers * shape.hidden_size + per_layer, per_layer

    def _scored(self, candidate: StageDeployment, mixed: bool) -> float:
        """Bytes of each token in a forward pass that keeps nothing."""
        return layer_activation_bytes(self.shape, candidate.tensor_parallel, mixed)

    def _copied(self, candidate: StageDeployment, mixed: bool) -> float:
        """The bf16 copies that autocast makes of all weights that a rank computes with, its own or
        gathered: they live until the forward pass ends, where autograd needs them until it is
        back."""
        return 2 * self.shape.parameters / candidate.tensor_parallel if mixed else 0.0

    def _gathered(self, candidate: StageDeployment) -> float:
        """Parameters of other ranks, gathered in float32 as they are stored."""
        if candidate.parts == 1:
            return 0.0
        # One layer in use and the next one on its way; the largest table is gathered alone.
        largest = max(2 * self.shape.layer_parameters, self.shape.embedding_parameters)
        return 4 * largest / candidate.tensor_parallel

    def _logits_of(self, candidate: StageDeployment, answers: float, backward: bool) -> float:
        width = self.shape.vocabulary / candidate.tensor_parallel
        usual = positions_at_a_time(width, gpu=not self.shared)
        at_a_time = candidate.logits_chunk_tokens or usual
        return self._logits(width, min(answers, at_a_time), answers > at_a_time, backward)

    def _logits(self, width: float, rows: float, several: bool, backward: bool) -> float:
        """A chunk, and the gradient of the head's weight, summed in float32 over a microbatch."""
        summed = 4 * width * self.shape.hidden_size if backward else 0.0
        return rows * width * BYTES_PER_LOGIT + summed

    def _with_cache(self, fixed: Memory, candidate: StageDeployment, vllm: VllmConfig) -> Memory:
        given = vllm.gpu_memory_utilization * self.device.memory_bytes
        return fixed._replace(kv_cache=max(0.0, given - fixed.total))


def _tokens(candidate: StageDeployment, longest: float) -> float:
    return max(float(candidate.max_tokens_per_microbatch), longest) / candidate.context_parallel


def standard_activation_bytes(shape: ModelShape, tokens: int) -> float:
    """Activations of a whole model in 16 bit with stored attention scores and no parallelism:
    s·h·L·(34 + 5·a·s/h), for one sequence of `tokens` (Korthikanti et al. 2022, equation 1)."""
    scores = 5 * shape.attention_heads * tokens / shape.hidden_size
    return float(tokens * shape.hidden_size * shape.layers) * (34 + scores)


def layer_activation_bytes(shape: ModelShape, tensor: int = 1, mixed: bool = True) -> float:
    """What one token leaves in one layer for the backward pass, bytes on one device.

    Two norms; query, key, value, attention output and its log-sum; four feed-forward products (two
    without a gate). Tensor parallel ranks share the last two groups.
    """
    value = 2 if mixed else 4
    attention = 2 * (shape.query_size + shape.key_value_size) * value + 4 * shape.attention_heads
    products = (4 if shape.gated_mlp else 2) * shape.feed_forward * value
    return norm_bytes(shape, mixed) + (attention + products) / tensor


def selective_layer_bytes(shape: ModelShape, tensor: int = 1, mixed: bool = True) -> float:
    """What one token leaves in one layer under selective checkpointing, bytes on one device.

    The layer's input; the products: query, key, value, output, gate, up and down; attention's
    output and its log-sum. Tensor parallel ranks share what is not as wide as the model.
    """
    value = 2 if mixed else 4
    split = 2 * (shape.query_size + shape.key_value_size)
    split += (2 if shape.gated_mlp else 1) * shape.feed_forward
    return 3 * value * shape.hidden_size + (value * split + 4 * shape.attention_heads) / tensor


def norm_bytes(shape: ModelShape, mixed: bool) -> int:
    """What the two norms of a layer keep of a token, whose residual sums are float32 also under
    autocast: input and normalised input, and what the matrices read. Under bf16 autocast each of
    five matrices keeps a copy of its own; otherwise they share the norm's output."""
    return shape.hidden_size * (2 * (4 + 4) + (5 * 2 if mixed else 2 * 4))


def kv_bytes_per_token(shape: ModelShape, tensor: int, value: int = 2) -> float:
    """Keys and values of one token on one rank; heads beyond the model's are copies."""
    return shape.kv_bytes_per_token() * value / 2 / min(tensor, shape.key_value_heads)


def gib(size: float) -> str:
    """Such as `12.3 GiB`, or `700 MiB` where that says more."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"
