"""What an update rank holds while it computes a microbatch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from earl_core.deployment.shapes import ModelShape
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.selector.model.activations import (
    compiled_layer_bytes,
    feed_forward_bytes,
    norm_bytes,
    routed_bytes,
    selective_layer_bytes,
)
from earl_core.selector.model.memory import Memory, TrainingNeeds
from earl_core.selector.model.sizes import BYTES_PER_LOGIT


class OnDevice(NamedTuple):
    """What depends on the kind of device. kept, mean: bytes that a token leaves in the largest and
    in the mean layer. under_way, logit_bytes: as in `MemoryModel`. rows: positions whose logits
    exist at a time."""

    kept: float
    mean: float
    under_way: tuple[float, float]
    logit_bytes: float
    rows: int


class Microbatch:
    """Bytes that a rank holds beside its parts of the state while it computes a microbatch.

    A unit, which is a layer, the embedding or the head, is gathered where others hold parts of it,
    and cast where bf16 computes (FSDP2, `fully_shard`): then there are its copy, the buffer that
    the next unit is gathered in, its gradient, and the float32 buffer in which the gradient of the
    unit before is summed over the ranks. wrapped: that there are copies at all.
    """

    def __init__(
        self,
        shape: ModelShape,
        candidate: StageDeployment,
        longest: float,
        needs: TrainingNeeds,
        device: OnDevice,
    ) -> None:
        tensor = candidate.tensor_parallel
        self.value = 2 if needs.mixed else 4
        self.mixed, self.tied, self.layers = needs.mixed, shape.tied_embeddings, shape.layers
        self.shared, self.wrapped = candidate.parts > 1, needs.mixed or candidate.parts > 1
        degree = candidate.expert_parallel
        self.layer = shape.largest_layer(degree) / tensor
        self.table = shape.embedding_parameters / tensor
        self.head = shape.outputs * shape.hidden_size / tensor
        # What of them is trained.
        self.trained, self.trained_table, self.trained_head = self.layer, self.table, self.head
        if shape.adapter is not None:
            self.trained = shape.pair_parameters(tensor)
            self.trained_table = self.trained_head = 0.0
            self.layer += self.trained
        budget = max(float(candidate.max_tokens_per_microbatch), longest)
        self.tokens = budget / candidate.context_parallel
        # A token's states between two layers, of which tensor ranks have parts, and what it leaves
        # in one layer.
        self.whole_state = self.value * shape.hidden_size
        self.state = self.whole_state / tensor
        self.kept, mean = device.kept, device.mean
        selective = selective_layer_bytes(shape, tensor, needs.mixed, degree)
        if needs.compiled:
            self.kept = mean = selective = compiled_layer_bytes(shape, tensor, needs.mixed)
        rung = candidate.activation_checkpointing
        self.between = {"none": mean, "selective": selective, "full": self.state}[rung]
        # Computed again beside what all layers have left.
        lean = rung == "none" or (needs.compiled and rung == "selective")
        self.again = 0.0 if lean else self.kept
        layers, numbers = device.under_way
        self.layers_under_way = layers * self.kept
        self.table_under_way = numbers * self.trained_head
        self.logit_bytes = device.logit_bytes if needs.mixed else 4
        self.norms = norm_bytes(shape, tensor, needs.mixed)
        self.normalising = 18 * shape.hidden_size / tensor
        if shape.states is not None:
            # The norm of its gated output is as wide as the values.
            self.normalising = max(self.normalising, 16.0 * shape.states.value_size)
        self.products = _Products.of(shape, tensor, degree, needs, self.trained)
        # Keys and values of a whole pack, of which a context rank has a part.
        whole = 2 * self.value * shape.key_value_size * candidate.context_parallel / tensor
        self.whole = whole if candidate.context_parallel > 1 else 0.0
        self.answers = answers = self.tokens * needs.answered
        self.row = 4 * shape.hidden_size
        # Chunks are as even as can be.
        chunks = max(1, math.ceil(answers / device.rows))
        self.logits = answers / chunks * shape.outputs / tensor

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
        width = max(self.products.forward + 2 * self.state, self.norms) + self.layers_under_way / 4
        head = self._copy(self.head)
        whole = head if self.tied else 0.0
        gathered = self._copy(self.layer) + self._buffer(self.layer) + whole
        yield Memory(weights=gathered, activations=self.tokens * width)
        logits = self.logits * BYTES_PER_LOGIT
        yield Memory(weights=head, activations=self.tokens * 2 * self.state, logits=logits)

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
            weights=self._copy(self.head) + self._buffer(self.head),
            activations=self.tokens * kept,
            logits=4 * self.logits,
        )
        summed = 4 * self.trained_head
        cast = self.value * self.trained_head if self.mixed else 0.0
        one = 4 + self.value if self.mixed else 4
        states = self.answers * self.row, self.tokens * (self.row + self.whole_state)
        for gradients, logits, activations in (
            (summed, self.logits * self.logit_bytes, states[0]),
            (summed, self.logits * one, sum(states)),
            (summed + cast, self.logits * 4, self.tokens * self.whole_state),
        ):
            yield Memory(
                weights=self._copy(self.head),
                gradients=gradients + self.table_under_way,
                activations=self.tokens * kept + activations,
                logits=logits,
            )

    def _in_layer(self, kept: float, summed: float, fetched: float) -> Iterator[Memory]:
        """Yield the memory at places of a layer: where the products of the feed-forward part are
        undone; where a norm is, which computes in
        float32; and where context ranks exchange keys, values and their gradients. kept: bytes a
        token. summed, fetched: parameters of the units that come before and after it in the
        backward pass."""
        weights = self._copy(self.layer) + self._buffer(fetched)
        gradients = 4 * summed if self.wrapped else 0.0
        if self.tied:
            # The head's copy and gradient wait for the embedding's.
            weights += self._copy(self.table)
            gradients += self._copy(self.trained_table)
        moving = self.state + self.whole_state + self.layers_under_way
        unit = self.trained if self.wrapped else self.products.first
        # A layer that is computed again keeps what it gathered.
        gathered = self.whole if self.again else 0.0
        rest = kept - self.products.kept
        for written, tokens in (
            *((each, kept + more + moving + gathered) for each, more in self.products.undone),
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


class _Products(NamedTuple):
    """The feed-forward part of the largest layer.

    kept, forward: bytes that a token leaves there for the backward pass, and has at most in a pass
    that keeps nothing. first: parameters of the matrix whose gradient comes first. undone: moments
    of the backward pass, each as the parameters that have gradients then, and the bytes of a token
    beside those of `kept`.
    """

    kept: float
    forward: float
    first: float
    undone: tuple[tuple[float, float], ...]

    @classmethod
    def of(
        cls, shape: ModelShape, tensor: int, degree: int, needs: TrainingNeeds, trained: float
    ) -> _Products:
        """degree: ranks that hold different experts. trained: parameters of the layer that are."""
        value = 2 if needs.mixed else 4
        if shape.routed_layers:
            return cls._routed(shape, degree, value)
        wide = value * shape.feed_forward / tensor
        kept = feed_forward_bytes(shape, tensor, needs.mixed)
        # Two products' gradients.
        moving = 2 * wide
        if needs.compiled:
            kept -= wide
            # A compiled layer's gradient from a matrix waits for the one from its pair.
            moving += wide if shape.adapter else 0.0
        matrix = min(trained, shape.hidden_size * shape.feed_forward / tensor)
        return cls(kept, 3 * wide, matrix, ((matrix, moving),))

    @classmethod
    def _routed(cls, shape: ModelShape, degree: int, value: int) -> _Products:
        """Of experts: rows, one for each expert of a token, are weighted and sorted back, which
        copies them, some in float32; later all experts have gradients, and so have the outputs of
        the first matrices."""
        rows = float(value * shape.experts_per_token * shape.hidden_size)
        wide = value * shape.experts_per_token * shape.expert_width
        experts = float(shape.experts // degree * shape.expert_parameters)
        shared = 3 * value * shape.shared_expert_size
        weighted = 4 / value * rows if shape.float32_gates else rows
        forward = max(2 * rows + 2 * weighted, rows + 3 * wide) + shared
        kept = routed_bytes(shape, mixed=value == 2)
        return cls(kept, forward, experts, ((0.0, 3 * weighted), (experts, -2.0 * wide)))
