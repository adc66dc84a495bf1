"""Peak memory of a stage under a stage deployment: by formula, corrected by measured peaks.

Formulas that hold only on a CPU are in `cpu`, those of a layer's activations in `activations`. All
sizes are bytes on one device.

Where an adapter is trained, the model is frozen in the dtype that computes, and has neither
gradients nor moments; its pairs have what all of a model has elsewhere.
"""

from __future__ import annotations

from earl_core.config.rollout import DraftsConfig, VllmConfig
from earl_core.deployment.shapes import DeviceFigures, Hardware, ModelShape
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.selector.model.activations import (
    engine_width,
    layer_activation_bytes,
    mean_activation_bytes,
    rule_bytes,
)
from earl_core.selector.model.memory import Memory, TrainingNeeds
from earl_core.selector.model.microbatch import Microbatch, OnDevice
from earl_core.selector.model.shares import shares
from earl_core.selector.model.sizes import BYTES_PER_LOGIT, positions_at_a_time

RUNTIME_BYTES = 2**30
"""Libraries, kernels and communication buffers of one process: an assumption."""

PREFILL_TOKENS = 8192
"""Prompt tokens that an engine computes in one pass, but for vLLM on large GPUs."""

MASK_ELEMENTS = 2**26
"""Numbers in the attention mask of the torch engine, at most."""

DRAFTED_LOGITS = 2**23
"""Logits of a pass over drafts, at most, unless its sequences alone have more."""

ADAPTERS = 2
"""Versions of an adapter that an engine holds."""


class MemoryModel:
    """The memory of one GPU. shared: whether all ranks of a host share one memory, so that theirs
    add up. outside: bytes that each process takes of it beside its tensors. runtime,
    engine_runtime: bytes that count as a part of the peak besides. under_way: layers' worth of what
    a layer leaves that comes and goes besides, and bytes of each number of the embedding.
    logit_bytes: of a logit whose gradient is made in bf16; on a GPU itself in float32, and the
    gradients of two chunks."""

    shared = False
    outside = float(RUNTIME_BYTES)
    runtime = engine_runtime = 0.0
    under_way = 0.0, 0.0
    logit_bytes = BYTES_PER_LOGIT

    def __init__(self, shape: ModelShape, device: DeviceFigures, hardware: Hardware) -> None:
        self.shape, self.device, self.hardware = shape, device, hardware

    def budget(self, fraction: float, reserved: float) -> float:
        """Bytes that a stage may use: of one device or of the host that its ranks share, less those
        that others hold (reserved)."""
        return max(1.0, fraction * self.device.memory_bytes - reserved)

    def short_of(self, peak: float, budget: float, reserved: float) -> str:
        """Describe a lack, such as `needs 3.0 GiB, but only 2.0 GiB are available on a device`."""
        text = f"needs {gib(peak)}, but only {gib(budget)} are available on a device"
        return text + (f" ({gib(reserved)} are libraries' and others')" if reserved else "")

    def training(self, candidate: StageDeployment, longest: float, needs: TrainingNeeds) -> Memory:
        """Peak of one update rank. longest: tokens of the longest sample, which no microbatch cuts.
        Its part of the state, the tokens' routing, which may be recorded, and beside them the most
        that a backward pass holds at a time."""
        work = self._microbatch(candidate, longest, needs)
        routing = self.shape.routing
        column = work.tokens * routing.token_bytes if routing is not None else 0.0
        state = self.state(candidate, needs.mixed)
        state = state._replace(activations=column, runtime=self.runtime)
        return max((state.plus(moment) for moment in work.backward()), key=lambda m: m.total)

    def _microbatch(
        self, candidate: StageDeployment, longest: float, needs: TrainingNeeds
    ) -> Microbatch:
        device = OnDevice(
            kept=self.layer_bytes(candidate, longest, needs.mixed),
            mean=self.mean_layer_bytes(candidate, longest, needs.mixed),
            under_way=self.under_way,
            logit_bytes=self.logit_bytes,
            rows=self.rows_at_a_time(candidate),
        )
        return Microbatch(self.shape, candidate, longest, needs, device)

    def state(self, candidate: StageDeployment, mixed: bool) -> Memory:
        """An update rank's part of parameters, gradients and moments, whatever the load: float32
        weights, gradients and two moments of what is trained, and a frozen model in the dtype that
        computes, divided by tensor, shard and context ranks, experts also by expert ranks."""
        trained = own = self._own(candidate)
        frozen = 0.0
        if self.shape.adapter is not None:
            frozen = (2 if mixed else 4) * own
            pairs = self.shape.layers * self.shape.pair_parameters(candidate.tensor_parallel)
            trained = pairs / candidate.parts
        moments = 0.0 if candidate.offload_optimizer else 8 * trained
        return Memory(weights=frozen + 4 * trained, gradients=4 * trained, optimizer=moments)

    def _own(self, candidate: StageDeployment) -> float:
        """Parameters of the model that lie on one rank of an update."""
        return sum(share.own for share in shares(self.shape, candidate))

    def resting(self, candidate: StageDeployment, mixed: bool) -> float:
        """Bytes that an update rank leaves in the host's memory while others have its device:
        weights and moments."""
        state = self.state(candidate._replace(offload_optimizer=False), mixed)
        return state.weights + state.optimizer

    def scoring(self, candidate: StageDeployment, longest: float, needs: TrainingNeeds) -> Memory:
        """Peak of one rank that only scores (reference, value): float32 weights, and a forward pass
        that keeps no activations. With an adapter it is an update rank, whose state is there."""
        state = Memory(weights=4 * self._own(candidate))
        if self.shape.adapter is not None:
            state = self.state(candidate, needs.mixed)._replace(gradients=0.0)
        state = state._replace(runtime=self.runtime)
        work = self._microbatch(candidate, longest, needs)
        return max((state.plus(moment) for moment in work.forward()), key=lambda m: m.total)

    def vllm(self, candidate: StageDeployment, settings: VllmConfig, value: int = 2) -> Memory:
        """One rank of a vLLM engine; the cache gets what weights, workspace and states leave of the
        share that it is given. value: bytes of a number in the engine's dtype."""
        shape, tensor = self.shape, candidate.tensor_parallel
        running = candidate.max_running_requests or 256
        tokens = min(self._prefill_tokens(), running * shape.max_positions)
        width = 4 * shape.hidden_size + (2 * shape.query_size + engine_width(shape, 4)) / tensor
        fixed = Memory(
            weights=self.engine_weights(tensor, value),
            activations=float(value) * tokens * width,
            # Rows of the sampler in the engine's dtype and in float32.
            logits=(4.0 + value) * running * shape.vocabulary / tensor,
            runtime=RUNTIME_BYTES,
            states=float(running) * sequence_bytes(shape, value) / tensor,
        )
        return self._with_cache(fixed, candidate, settings)

    def _prefill_tokens(self) -> int:
        """Return the tokens of a prefill that vLLM's `EngineArgs.get_batch_defaults` gives its
        usage context `LLM_CLASS`, for which the engine asks on a GPU."""
        large = 160 if "a100" in self.device.name.lower() else 70
        twice = not self.shared and self.device.memory_bytes >= large * 2**30
        return 2 * PREFILL_TOKENS if twice else PREFILL_TOKENS

    def torch_engine(
        self, sequences: float, longest: float, value: int, drafts: DraftsConfig | None = None
    ) -> Memory:
        """The torch engine, whose cache grows with what it holds. sequences: in play at a time.
        longest: tokens of the longest. value: bytes of a number in the engine's dtype.

        Every sequence has a row as wide as the longest. The cache grows a quarter ahead, and what
        grows or is read of it is there twice for a moment: measured, half as much again.
        """
        shape = self.shape
        tokens = min(float(PREFILL_TOKENS), sequences * longest)
        width = shape.hidden_size * (8 + value) + engine_width(shape, 3) * value
        if shape.states is not None:
            width += rule_bytes(shape.states)
        # The mask as numbers, and as the bits that it is made from.
        mask = min(float(MASK_ELEMENTS), tokens * longest) * (value + 1)
        drawn = sequences * shape.vocabulary
        return Memory(
            weights=self.engine_weights(1, value),
            activations=tokens * width + mask,
            # Logits, two softmaxes, and the cumulated probabilities in float64.
            logits=(max(drawn, DRAFTED_LOGITS) if drafts else drawn) * (16.0 + value),
            runtime=self.engine_runtime + (drafts.memory_bytes if drafts else 0),
            kv_cache=1.5 * sequences * longest * self._cached(value),
            states=1.5 * sequences * sequence_bytes(shape, value),
        )

    def _cached(self, value: int) -> float:
        """Bytes of a token in the torch engine's cache, which keeps no latents."""
        return float(value * self.shape.attention_layers * 2 * self.shape.key_value_size)

    def engine_weights(self, tensor: int, value: int) -> float:
        """Weights on an engine's rank: the model's, and the pairs of two versions of an adapter."""
        pairs = ADAPTERS * self.shape.layers * self.shape.pair_parameters(tensor)
        return float(value) * (self.shape.parameters / tensor + pairs)

    def layer_bytes(self, candidate: StageDeployment, longest: float, mixed: bool) -> float:
        """Count the bytes that a token leaves in the largest layer for the backward pass."""
        kept = layer_activation_bytes(self.shape, candidate.tensor_parallel, mixed)
        return kept + self.score_bytes(longest)

    def mean_layer_bytes(self, candidate: StageDeployment, longest: float, mixed: bool) -> float:
        """The same of the mean layer."""
        kept = mean_activation_bytes(self.shape, candidate.tensor_parallel, mixed)
        return kept + self.shape.attention_share * self.score_bytes(longest)

    def score_bytes(self, longest: float) -> float:
        """Count the bytes of a token's attention scores in a layer, where they are stored."""
        return 0.0

    def rows_at_a_time(self, candidate: StageDeployment) -> int:
        """Positions whose logits exist at a time."""
        width = self.shape.outputs / candidate.tensor_parallel
        return candidate.logits_chunk_tokens or positions_at_a_time(width, gpu=not self.shared)

    def _with_cache(self, fixed: Memory, candidate: StageDeployment, vllm: VllmConfig) -> Memory:
        given = vllm.gpu_memory_utilization * self.device.memory_bytes
        return fixed._replace(kv_cache=max(0.0, given - fixed.total))


def kv_bytes_per_token(shape: ModelShape, tensor: int, value: int = 2) -> float:
    """Keys and values of one token on one rank; heads beyond the model's are copies, and so is a
    latent, which all heads share."""
    heads = 1 if shape.latent is not None else shape.key_value_heads
    return shape.kv_bytes_per_token() * value / 2 / min(tensor, heads)


def sequence_bytes(shape: ModelShape, value: int) -> int:
    """Bytes of a sequence's states, however long it is; 0 for a model without."""
    return shape.states.sequence_bytes(value) if shape.states is not None else 0


def gib(size: float) -> str:
    """Write a number of bytes, such as `12.3 GiB`, or `700 MiB` where that says more."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"
