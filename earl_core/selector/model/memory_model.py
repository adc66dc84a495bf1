"""Peak memory of a stage under a stage deployment: by formula, corrected by measured peaks.

Formulas that hold only on a CPU are in `cpu`, those of a layer's activations in `activations`. All
sizes are bytes on one device.

Where an adapter is trained, the model is frozen in the dtype that computes, and has neither
gradients nor moments; its pairs have what all of a model has elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from operator import add
from typing import NamedTuple

from earl_core.config.rollout import DraftsConfig, VllmConfig
from earl_core.deployment.shapes import DeviceFigures, Hardware, ModelShape
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.selector.model.activations import (
    compiled_layer_bytes,
    feed_forward_bytes,
    layer_activation_bytes,
    norm_bytes,
    selective_layer_bytes,
)
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


class Memory(NamedTuple):
    """The uses of a device's memory, bytes."""

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

    def plus(self, other: Memory) -> Memory:
        """Both, use by use."""
        return Memory(*map(add, self, other))


class TrainingNeeds(NamedTuple):
    """Properties of the algorithm that decide the memory of training stages.

    mixed: bf16 copies compute, of float32 weights; else all is float32. compiled: the layers are.
    answered: share of the tokens that the policy wrote, the only ones with logits.
    """

    mixed: bool = True
    compiled: bool = False
    answered: float = 1.0


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
        Its part of the state, and beside it the most that a backward pass holds at a time."""
        state = self.state(candidate, needs.mixed)._replace(runtime=self.runtime)
        work = _Work(self, candidate, longest, needs)
        return max((state.plus(moment) for moment in work.backward()), key=lambda m: m.total)

    def state(self, candidate: StageDeployment, mixed: bool) -> Memory:
        """An update rank's part of parameters, gradients and moments, whatever the load: float32
        weights, gradients and two moments of what is trained, and a frozen model in the dtype that
        computes, divided by tensor, shard and context ranks."""
        trained = own = self.shape.parameters / (candidate.tensor_parallel * candidate.parts)
        frozen = 0.0
        if self.shape.adapter is not None:
            frozen = (2 if mixed else 4) * own
            pairs = self.shape.layers * self.shape.pair_parameters(candidate.tensor_parallel)
            trained = pairs / candidate.parts
        moments = 0.0 if candidate.offload_optimizer else 8 * trained
        return Memory(weights=frozen + 4 * trained, gradients=4 * trained, optimizer=moments)

    def resting(self, candidate: StageDeployment, mixed: bool) -> float:
        """Bytes that an update rank leaves in the host's memory while others have its device:
        weights and moments."""
        state = self.state(candidate._replace(offload_optimizer=False), mixed)
        return state.weights + state.optimizer

    def scoring(self, candidate: StageDeployment, longest: float, needs: TrainingNeeds) -> Memory:
        """Peak of one rank that only scores (reference, value): float32 weights, and a forward pass
        that keeps no activations. With an adapter it is an update rank, whose state is there."""
        own = 4 * self.shape.parameters / (candidate.tensor_parallel * candidate.parts)
        state = Memory(weights=own)
        if self.shape.adapter is not None:
            state = self.state(candidate, needs.mixed)._replace(gradients=0.0)
        state = state._replace(runtime=self.runtime)
        work = _Work(self, candidate, longest, needs)
        return max((state.plus(moment) for moment in work.forward()), key=lambda m: m.total)

    def vllm(self, candidate: StageDeployment, settings: VllmConfig, value: int = 2) -> Memory:
        """One rank of a vLLM engine; the cache gets what weights and workspace leave of the share
        that it is given. value: bytes of a number in the engine's dtype."""
        shape, tensor = self.shape, candidate.tensor_parallel
        running = candidate.max_running_requests or 256
        tokens = min(self._prefill_tokens(), running * shape.max_positions)
        width = 4 * shape.hidden_size + (2 * shape.query_size + 4 * shape.feed_forward) / tensor
        fixed = Memory(
            weights=self.engine_weights(tensor, value),
            activations=float(value) * tokens * width,
            # Rows of the sampler in the engine's dtype and in float32.
            logits=(4.0 + value) * running * shape.vocabulary / tensor,
            runtime=RUNTIME_BYTES,
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
        width = shape.hidden_size * (8 + value) + 3 * shape.feed_forward * value
        # The mask as numbers, and as the bits that it is made from.
        mask = min(float(MASK_ELEMENTS), tokens * longest) * (value + 1)
        drawn = sequences * shape.vocabulary
        return Memory(
            weights=self.engine_weights(1, value),
            activations=tokens * width + mask,
            # Logits, two softmaxes, and the cumulated probabilities in float64.
            logits=(max(drawn, DRAFTED_LOGITS) if drafts else drawn) * (16.0 + value),
            runtime=self.engine_runtime + (drafts.memory_bytes if drafts else 0),
            kv_cache=1.5 * sequences * longest * kv_bytes_per_token(shape, 1, value),
        )

    def engine_weights(self, tensor: int, value: int) -> float:
        """Weights on an engine's rank: the model's, and the pairs of two versions of an adapter."""
        pairs = ADAPTERS * self.shape.layers * self.shape.pair_parameters(tensor)
        return float(value) * (self.shape.parameters / tensor + pairs)

    def layer_bytes(self, candidate: StageDeployment, longest: float, mixed: bool) -> float:
        """Count the bytes that a token leaves in one layer for the backward pass."""
        return layer_activation_bytes(self.shape, candidate.tensor_parallel, mixed)

    def rows_at_a_time(self, candidate: StageDeployment) -> int:
        """Positions whose logits exist at a time."""
        width = self.shape.vocabulary / candidate.tensor_parallel
        return candidate.logits_chunk_tokens or positions_at_a_time(width, gpu=not self.shared)

    def _with_cache(self, fixed: Memory, candidate: StageDeployment, vllm: VllmConfig) -> Memory:
        given = vllm.gpu_memory_utilization * self.device.memory_bytes
        return fixed._replace(kv_cache=max(0.0, given - fixed.total))


class _Work:
    """Bytes that a rank holds beside its parts of the state while it computes a microbatch.

    A unit, which is a layer, the embedding or the head, is gathered where others hold parts of it,
    and cast where bf16 computes (FSDP2, `fully_shard`): then there are its copy, the buffer that
    the next unit is gathered in, its gradient, and the float32 buffer in which the gradient of the
    unit before is summed over the ranks. wrapped: that there are copies at all.
    """

    def __init__(
        self, model: MemoryModel, candidate: StageDeployment, longest: float, needs: TrainingNeeds
    ) -> None:
        shape, tensor = model.shape, candidate.tensor_parallel
        self.value = 2 if needs.mixed else 4
        self.mixed, self.tied, self.layers = needs.mixed, shape.tied_embeddings, shape.layers
        self.shared, self.wrapped = candidate.parts > 1, needs.mixed or candidate.parts > 1
        self.layer = shape.layer_parameters / tensor
        self.table = shape.embedding_parameters / tensor
        # What of them is trained.
        self.trained, self.trained_table = self.layer, self.table
        if shape.adapter is not None:
            self.trained, self.trained_table = shape.pair_parameters(tensor), 0.0
            self.layer += self.trained
        budget = max(float(candidate.max_tokens_per_microbatch), longest)
        self.tokens = budget / candidate.context_parallel
        # A token's states between two layers, of which tensor ranks have parts, and what it leaves
        # in one layer.
        self.whole_state = self.value * shape.hidden_size
        self.state = self.whole_state / tensor
        self.kept = model.layer_bytes(candidate, longest, needs.mixed)
        selective = selective_layer_bytes(shape, tensor, needs.mixed)
        self.products = feed_forward_bytes(shape, tensor, needs.mixed)
        # A compiled layer's gradient from a matrix waits for the one from its pair.
        self.summand = 0.0
        if needs.compiled:
            self.summand = self.value * shape.feed_forward / tensor if shape.adapter else 0.0
            self.kept = selective = compiled_layer_bytes(shape, tensor, needs.mixed)
            self.products -= self.value * shape.feed_forward / tensor
        rung = candidate.activation_checkpointing
        self.between = {"none": self.kept, "selective": selective, "full": self.state}[rung]
        # Computed again beside what all layers have left.
        lean = rung == "none" or (needs.compiled and rung == "selective")
        self.again = 0.0 if lean else self.kept
        layers, numbers = model.under_way
        self.layers_under_way = layers * self.kept
        self.table_under_way = numbers * self.trained_table
        self.logit_bytes = model.logit_bytes if needs.mixed else 4
        self.norms = norm_bytes(shape, tensor, needs.mixed)
        self.normalising = 18 * shape.hidden_size / tensor
        self.wide = self.value * shape.feed_forward / tensor
        self.matrix = min(self.trained, shape.hidden_size * shape.feed_forward / tensor)
        # Keys and values of a whole pack, of which a context rank has a part.
        whole = 2 * self.value * shape.key_value_size * candidate.context_parallel / tensor
        self.whole = whole if candidate.context_parallel > 1 else 0.0
        self.answers = answers = self.tokens * needs.answered
        self.row = 4 * shape.hidden_size
        # Chunks are as even as can be.
        chunks = max(1, math.ceil(answers / model.rows_at_a_time(candidate)))
        self.logits = answers / chunks * shape.vocabulary / tensor

    def backward(self) -> Iterator[Memory]:
        """The moments that may hold the most: the head's backward pass, which comes first, those of
        the last two layers and of the first one, and the embedding's."""
        yield from self._head()
        kept = self.layers * self.between + self.again
        yield from self._in_layer(kept, summed=0.0, fetched=self.layer)
        if self.layers > 1:
            yield from self._in_layer(kept - self.between, self.trained, self.layer)
        if not self.tied:
            yield from self._in_layer(self.kept, self.trained, self.table)
        yield self._embedding()

    def forward(self) -> Iterator[Memory]:
        """The same of a pass that keeps nothing: in a layer, and in the head."""
        width = max(3 * self.wide + 2 * self.state, self.norms) + self.layers_under_way / 4
        table = self._copy(self.table)
        whole = table if self.tied else 0.0
        gathered = self._copy(self.layer) + self._buffer(self.layer) + whole
        yield Memory(weights=gathered, activations=self.tokens * width)
        logits = self.logits * BYTES_PER_LOGIT
        yield Memory(
            weights=max(table, whole), activations=self.tokens * 2 * self.state, logits=logits
        )

    def _copy(self, unit: float) -> float:
        return self.value * unit if self.wrapped else 0.0

    def _buffer(self, unit: float) -> float:
        return self.value * unit if self.shared else 0.0

    def _head(self) -> Iterator[Memory]:
        """The forward pass ends here, beside the buffer that the weight was gathered in. The
        gradient of the head's weight is summed in float32, beside a chunk of logits and what goes
        to the states; these are added up at the end; and the weight's is cast."""
        kept = self.layers * self.between + self.norms / 2
        yield Memory(
            weights=self._copy(self.table) + self._buffer(self.table),
            activations=self.tokens * kept,
            logits=4 * self.logits,
        )
        summed = 4 * self.trained_table
        cast = self.value * self.trained_table if self.mixed else 0.0
        one = 4 + self.value if self.mixed else 4
        states = self.answers * self.row, self.tokens * (self.row + self.whole_state)
        for gradients, logits, activations in (
            (summed, self.logits * self.logit_bytes, states[0]),
            (summed, self.logits * one, sum(states)),
            (summed + cast, self.logits * 4, self.tokens * self.whole_state),
        ):
            yield Memory(
                weights=self._copy(self.table),
                gradients=gradients + self.table_under_way,
                activations=self.tokens * kept + activations,
                logits=logits,
            )

    def _in_layer(self, kept: float, summed: float, fetched: float) -> Iterator[Memory]:
        """Yield the memory at three places of a layer: where the products of the feed-forward part
        are undone, when only the first matrix has a gradient; where a norm is, which computes in
        float32; and where context ranks exchange keys, values and their gradients. kept: bytes a
        token. summed, fetched: parameters of the units that come before and after it in the
        backward pass."""
        weights = self._copy(self.layer) + self._buffer(fetched)
        gradients = 4 * summed if self.wrapped else 0.0
        if self.tied:
            # The head's copy and gradient wait for the embedding's.
            weights += self._copy(self.table)
            gradients += self._copy(self.trained_table)
        # Two products' gradients, and those of the residual stream before and after them.
        moving = 2 * self.wide + self.state + self.whole_state + self.layers_under_way
        moving += self.summand
        unit = self.trained if self.wrapped else self.matrix
        # A layer that is computed again keeps what it gathered.
        gathered = self.whole if self.again else 0.0
        rest = kept - self.products
        for written, tokens in (
            (self.matrix, kept + moving + gathered),
            (unit, rest + self.normalising + gathered),
            (unit, rest + 3 * self.whole),
        ):
            yield Memory(
                weights=weights,
                gradients=gradients + self.value * written,
                activations=self.tokens * tokens,
            )

    def _embedding(self) -> Memory:
        if not self.wrapped:
            return Memory(gradients=4 * self.trained_table)
        units = 2 if self.tied else 1
        return Memory(gradients=(units * self.value + 4) * self.trained_table)


def kv_bytes_per_token(shape: ModelShape, tensor: int, value: int = 2) -> float:
    """Keys and values of one token on one rank; heads beyond the model's are copies."""
    return shape.kv_bytes_per_token() * value / 2 / min(tensor, shape.key_value_heads)


def gib(size: float) -> str:
    """Write a number of bytes, such as `12.3 GiB`, or `700 MiB` where that says more."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"
