"""Context parallelism: the tokens of one pack dealt to several ranks.

A pack of T tokens is cut into 2c stretches; of c ranks, rank r holds stretches r and 2c - 1 - r
(zigzag order), so that a long sample's early tokens, which attend to little, lie on the rank of its
late ones, which attend to much. Everything but attention works token by token. In attention a rank
has the queries of its own tokens and all ranks' keys and values, which are gathered layer by layer;
their gradients are summed back to the ranks that the keys came from.

A rank keeps O(T / c) until the backward pass: the gathered keys and values of a layer are dropped
after its attention and gathered again when its backward pass begins.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

from earl_core.learner.data.masks import PackedMasks
from earl_core.learner.data.packing import Allocate, PackedMicrobatch

if TYPE_CHECKING:
    from earl_core.learner.parallel.mesh import UpdateMesh

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(query [T_r, heads, dim], key, value [T, kv_heads, dim]) → [T_r, heads, dim]."""


@dataclass(frozen=True)
class ContextGroup:
    """This rank's place among the `size` ranks that share a pack, and their process group."""

    rank: int
    size: int
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, mesh: UpdateMesh | None) -> ContextGroup | None:
        """The mesh's context dimension; None where it has one rank."""
        if mesh is None or mesh.deployment.context_parallel == 1:
            return None
        size, group = mesh.deployment.context_parallel, mesh.group("context_parallel")
        return cls(mesh.context_rank, size, group)

    def places(self, tokens: int) -> np.ndarray:
        """This rank's tokens of a pack of so many, as ascending pack positions, int64. Of a rank
        that no token was dealt to, the first one, because models take no empty sequence."""
        mine = ContextCut.even(tokens, self.size).positions(self.rank)
        return mine if mine.size else np.zeros(1, dtype=np.int64)


@dataclass(frozen=True)
class ContextCut:
    """Where a pack is cut: stretch i is [edges[i], edges[i + 1]), 2c of them for c ranks."""

    edges: tuple[int, ...]

    @classmethod
    def even(cls, tokens: int, size: int) -> ContextCut:
        """2 * size stretches that differ by at most one token; some are empty in a tiny pack."""
        count = 2 * size
        return cls(tuple(index * tokens // count for index in range(count + 1)))

    @property
    def size(self) -> int:
        """Ranks."""
        return len(self.edges) // 2

    def stretches(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """(start, stop) of the rank's early and of its late stretch."""
        late = 2 * self.size - 1 - rank
        return ((self.edges[rank], self.edges[rank + 1]), (self.edges[late], self.edges[late + 1]))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return tuple(
            sum(stop - start for start, stop in self.stretches(rank)) for rank in range(self.size)
        )

    def positions(self, rank: int) -> np.ndarray:
        """The rank's tokens as pack positions, in its order; int64."""
        return np.concatenate([np.arange(*stretch) for stretch in self.stretches(rank)])

    @cached_property
    def owners(self) -> np.ndarray:
        """The rank of each token of the pack; int64 [T]."""
        stretches = np.arange(2 * self.size)
        ranks = np.minimum(stretches, stretches[::-1])
        return np.repeat(ranks, np.diff(self.edges))


@dataclass(frozen=True)
class PackExchange:
    """Moves rows of a pack, one per token, between the ranks that its tokens are dealt to."""

    place: ContextGroup
    cut: ContextCut

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """This rank's rows [T_r, ...] → all rows [T, ...] in pack order. Collective."""
        most = max(self.cut.counts)
        received = _all_gather(_padded(local, most), self.place)
        parts = []
        for index, length in enumerate(np.diff(self.cut.edges).tolist()):
            rank = min(index, 2 * self.cut.size - 1 - index)
            late = index != rank
            parts.append(received.narrow(0, self._start(rank, late=late, most=most), length))
        return torch.cat(parts)

    def sum_to_owner(self, whole: torch.Tensor) -> torch.Tensor:
        """Every rank's [T, ...] → this rank's rows [T_r, ...], summed over ranks. Collective.

        Summed here, in the order of the ranks and in float32, because a reduction under way rounds
        16 bits at every rank, in an order of its own; as many bytes travel.
        """
        counts, mine = list(self.cut.counts), self.cut.counts[self.place.rank]
        sent = torch.cat(
            [
                whole[start:stop]
                for rank in range(self.cut.size)
                for start, stop in self.cut.stretches(rank)
            ]
        )
        received = whole.new_empty(self.cut.size, mine, *whole.shape[1:])
        dist.all_to_all_single(
            received.flatten(0, 1), sent, [mine] * len(counts), counts, group=self.place.group
        )
        # Of 16 bits, too, torch sums in float32 and rounds once.
        return received.sum(0)

    def _start(self, rank: int, *, late: bool, most: int) -> int:
        """The row at which a rank's stretch begins among all ranks' rows, padded to `most` each."""
        first, stop = self.cut.stretches(rank)[0]
        return rank * most + (stop - first if late else 0)


def _collective(name: str, before: str) -> Callable[..., object]:
    """Torch's collective, by its name since torch 2.13 or the one before, for which 2.13 warns."""
    found: Callable[..., object] = getattr(dist, name, None) or getattr(dist, before)
    return found


def _padded(local: torch.Tensor, length: int) -> torch.Tensor:
    if local.shape[0] == length:
        return local.contiguous()
    padded = local.new_zeros(length, *local.shape[1:])
    padded[: local.shape[0]] = local
    return padded


def _all_gather(padded: torch.Tensor, place: ContextGroup) -> torch.Tensor:
    """Equal parts [n, ...] of all ranks, [size * n, ...]."""
    received = padded.new_empty(place.size * padded.shape[0], *padded.shape[1:])
    _collective("all_gather_single", "all_gather_into_tensor")(received, padded, group=place.group)
    return received


@dataclass(frozen=True)
class PackShare:
    """One rank's part of a packed microbatch, on the host; T_r tokens, T'_r trained ones.

    tokens, position_ids: int64 [T_r], at `ContextGroup.places`; the token of a rank that none was
    dealt to attends to nothing and is not attended to. predictors: int64 [T'_r], places among the
    rank's tokens; targets: int64 [T'_r]; in the pack's trained order, as the masks are. A trained
    token belongs to the rank that holds its predictor. trained: int64 [T'_r], their places among
    the pack's T' trained tokens. order: int64 [T'], where each of those lies among all ranks'
    parts, padded to `most` each. copies: [T_r], as the pack's; that token has none.
    """

    exchange: PackExchange
    tokens: np.ndarray
    position_ids: np.ndarray
    predictors: np.ndarray
    targets: np.ndarray
    trained: np.ndarray
    order: np.ndarray
    most: int
    masks: PackedMasks | None
    copies: np.ndarray | None


def share_of(packed: PackedMicrobatch, place: ContextGroup, allocate: Allocate) -> PackShare:
    """Cut a microbatch and take this rank's part; it may have no token to train, or none at all."""
    cut = ContextCut.even(packed.tokens.size, place.size)
    mine = place.places(packed.tokens.size)
    tokens, position_ids = (allocate(mine.size, "int64") for _ in range(2))
    tokens[:] = packed.tokens[mine]
    position_ids[:] = packed.position_ids[mine]
    local = np.zeros(packed.tokens.size, dtype=np.int64)
    local[mine] = np.arange(mine.size)
    owner = cut.owners[packed.predictors]
    counts = np.bincount(owner, minlength=place.size)
    most = int(counts.max())
    order = allocate(owner.size, "int64")
    for rank in range(place.size):
        order[owner == rank] = rank * most + np.arange(counts[rank])
    at = np.flatnonzero(owner == place.rank)
    predictors, targets, trained = (allocate(at.size, "int64") for _ in range(3))
    predictors[:] = local[packed.predictors[at]]
    targets[:] = packed.targets[at]
    trained[:] = at
    exchange = PackExchange(place, cut)
    masks = None if packed.masks is None else packed.masks.take(at)
    copies = None
    if packed.copies is not None:
        copies = allocate(mine.size, "float32")
        copies[:] = packed.copies[mine] if cut.counts[place.rank] else 0.0
    return PackShare(
        *(exchange, tokens, position_ids, predictors, targets, trained, order, most),
        *(masks, copies),
    )


@dataclass(frozen=True)
class TrainedGather:
    """The order in which trained tokens come together again; see `PackShare`, on the device."""

    place: ContextGroup
    trained: torch.Tensor
    order: torch.Tensor
    most: int


def gather_trained(local: torch.Tensor, gather: TrainedGather | None) -> torch.Tensor:
    """A number per trained token of this rank [T'_r] → of the microbatch [T'], in its order.

    Collective over the context ranks, which must compute the same loss from the result: each
    takes its own tokens' part of the gradient, so the loss counts once. Without context
    parallelism `local` itself.
    """
    if gather is None:
        return local
    gathered = _GatherTrained.apply(local, gather)  # type: ignore[no-untyped-call]
    assert isinstance(gathered, torch.Tensor)
    return gathered


class _GatherTrained(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, gather: TrainedGather) -> torch.Tensor:
        ctx.gather = gather
        if gather.most == 0:
            return local.new_empty(0, *local.shape[1:])
        return _all_gather(_padded(local, gather.most), gather.place).index_select(0, gather.order)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0].index_select(0, ctx.gather.trained), None


def attend_to_all_ranks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    exchange: PackExchange,
    attend: Attend,
) -> torch.Tensor:
    """`attend` with this rank's queries [T_r, heads, dim] and the whole pack's keys and values.

    key, value: this rank's, [T_r, kv_heads, dim]; they travel in the value's dtype. Collective, in
    the backward pass too; a rank without tokens takes part, and gets zeros.
    """
    heads, dims = key.shape[1], (key.shape[2], value.shape[2])
    local = torch.cat([key.to(value.dtype).flatten(1), value.flatten(1)], dim=1)
    idle = exchange.cut.counts[exchange.place.rank] == 0
    if idle:
        local = local[:0]
    tracked = torch.is_grad_enabled() and (query.requires_grad or local.requires_grad)
    # Where the caller drops what is saved anyway (activation checkpointing), nothing is gained,
    # and tensors saved under hooks of our own would escape it.
    kept = _GatheredAgain(local.detach(), exchange) if tracked and not _hooked() else None
    whole = _GatherRows.apply(local, exchange, kept)  # type: ignore[no-untyped-call]
    with nullcontext() if kept is None else saved_tensors_hooks(kept.pack, kept.unpack):
        if idle:
            shape = (*query.shape[:2], dims[1])
            attended = _NoQueries.apply(query, whole, shape)  # type: ignore[no-untyped-call]
        else:
            keys, values = whole.split([heads * dim for dim in dims], dim=1)
            attended = attend(
                query, keys.unflatten(1, (heads, dims[0])), values.unflatten(1, (heads, dims[1]))
            )
    if kept is not None:
        attended = _GatherAgain.apply(attended, kept)  # type: ignore[no-untyped-call]
    assert isinstance(attended, torch.Tensor)
    return attended


def _hooked() -> bool:
    """Tell whether someone else's hooks take the tensors that autograd saves."""
    try:
        with disable_saved_tensors_hooks("unused"):
            return False
    except RuntimeError:
        return True


@dataclass(eq=False)
class _GatheredAgain:
    """Stands for a layer's gathered keys and values between forward and backward pass.

    Autograd saves how a view lies in them instead of the view. storage: where they lay in the
    forward pass. whole: they themselves, in the backward pass.
    """

    local: torch.Tensor
    exchange: PackExchange
    storage: int = 0
    whole: torch.Tensor | None = None

    def pack(self, tensor: torch.Tensor) -> object:
        if tensor.untyped_storage().data_ptr() != self.storage:
            return tensor
        return tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        assert self.whole is not None, "the backward pass of attention began without its keys"
        return self.whole.as_strided(*saved)


class _GatherRows(torch.autograd.Function):
    """[T_r, n] of each rank → [T, n]; the gradient is the sum over the ranks."""

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, exchange: PackExchange, kept: _GatheredAgain | None
    ) -> torch.Tensor:
        ctx.exchange, ctx.kept = exchange, kept
        whole = exchange.gather(local)
        if kept is not None:
            kept.storage = whole.untyped_storage().data_ptr()
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.kept is not None:
            ctx.kept.whole = None
        return ctx.exchange.sum_to_owner(gradients[0]), None, None


class _GatherAgain(torch.autograd.Function):
    """The identity; its backward pass, the first of a layer's attention, gathers the keys again.
    Every rank has this node, whatever its attention, so that all ranks come to the collective."""

    @staticmethod
    def forward(ctx: Any, attended: torch.Tensor, kept: _GatheredAgain) -> torch.Tensor:
        ctx.kept = kept
        return attended.view_as(attended)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.kept.whole = ctx.kept.exchange.gather(ctx.kept.local)
        return gradients[0], None


class _NoQueries(torch.autograd.Function):
    """Attention of a rank without tokens: zeros, but with a place in everyone's backward pass.

    It saves a tensor, as attention does: under activation checkpointing that is what makes a layer
    be computed again, and so the rank come to the collectives of that.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, whole: torch.Tensor, shape: tuple[int, ...]
    ) -> torch.Tensor:
        ctx.whole = whole.shape
        ctx.save_for_backward(query)
        return whole.new_zeros(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (query,) = ctx.saved_tensors
        return torch.zeros_like(query), gradients[0].new_zeros(ctx.whole), None
