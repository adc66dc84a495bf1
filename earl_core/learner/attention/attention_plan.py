"""Plan of the tokens of a pack that attend to each other, and of the calls; made on the host.

Samples of similar length share one batched call; right padding needs no mask there, because causal
attention never looks to the right. Tokens that several samples begin with lie in the pack once
(`data.packing`): the runs that continue them attend to them and to themselves. A context rank plans
for the runs it has, with the keys of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from earl_core.learner.attention.context_parallel import PackExchange
from earl_core.learner.attention.state_plan import (
    ConvolutionPlan,
    StatePlan,
    kernels_found,
)
from earl_core.learner.data.padding import group_similar
from earl_core.learner.data.prefix_tree import PrefixTree, cut_tree, separate
from earl_core.learner.shared_rows import Rows
from earl_core.system.errors import ConfigError

# Longer samples amortise a call of their own, so padding them together only costs.
_NO_PADDING_FROM = 512


def kernel_calls_wanted(device: torch.device) -> bool:
    """Tell whether calls of the varlen kernel are worth planning on this device."""
    return device.type != "cpu"


@dataclass(frozen=True)
class Bucket:
    """Runs attended in one batched call: each sees the same number of tokens before it.

    count: runs. queries: run after run, padded to one length. keys: run after run, what it sees
    before it and itself, padded likewise.
    """

    count: int
    queries: Rows
    keys: Rows


@dataclass(frozen=True)
class KernelCall:
    """Runs that a CUDA kernel attends in one call; their queries lie in order.

    cu_seqlens, cu_keys: int32 [runs + 1], where each run's queries and keys begin among these.
    longest, longest_keys: of any run.
    """

    queries: Rows
    keys: Rows
    cu_seqlens: torch.Tensor
    cu_keys: torch.Tensor
    longest: int
    longest_keys: int


@dataclass(frozen=True)
class SampleBoundaries:
    """The tokens of a pack that see each other, planned once per pack on the host.

    tokens: T, at least 1, because models take no empty sequence. cu_seqlens: int32 [runs + 1], on
    the device; without shared prefixes a run is a sample. longest: tokens of the longest sample.
    buckets: for devices without a varlen kernel; calls: for those with one (not made for the CPU).
    scatter: int64 [T], the position of each query among the buckets' concatenated padded positions,
    or None for the identity. padded_tokens: positions that attention computes. exchange: where the
    queries are one context rank's, how it gets the others' keys, which are numbered as in the whole
    pack. None: queries and keys are both the whole pack. tree: of the whole pack.
    """

    tokens: int
    cu_seqlens: torch.Tensor
    longest: int
    buckets: tuple[Bucket, ...]
    calls: tuple[KernelCall, ...]
    scatter: torch.Tensor | None
    padded_tokens: int
    tree: PrefixTree
    exchange: PackExchange | None = None

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int], device: torch.device | str = "cpu"
    ) -> SampleBoundaries:
        """Samples of these lengths (all positive) that share nothing, end to end."""
        if len(lengths) == 0 or min(lengths) < 1:
            raise ValueError(f"A pack needs at least one sample of at least one token: {lengths}.")
        return cls.from_tree(separate(lengths), device)

    @classmethod
    def from_tree(
        cls,
        tree: PrefixTree,
        device: torch.device | str = "cpu",
        exchange: PackExchange | None = None,
    ) -> SampleBoundaries:
        """Plan the attention of a pack, or of the context rank's part of it that `exchange` names.
        tree: of the whole pack, as `pack` gives it."""
        tree = tree if exchange is None else cut_tree(tree, exchange.cut.edges)
        queries = _queries_of(tree, exchange)
        scatter = np.empty(int(queries.sizes.sum()), dtype=np.int64)
        buckets: list[Bucket] = []
        offset = 0
        for parent, members in _alike(queries.parents, queries.sizes):
            bucket, real, local = _bucket(tree, queries, parent, members, device)
            padded = offset + np.arange(real.size).reshape(real.shape)
            scatter[local[real]] = padded[real]
            buckets.append(bucket)
            offset += real.size
        identity = np.array_equal(scatter, np.arange(offset))
        cu_seqlens = _cumulative(queries.sizes).to(device)
        return cls(
            tokens=max(1, scatter.size),
            cu_seqlens=cu_seqlens,
            longest=max(
                (tree.runs[run].depth + tree.runs[run].length for run in queries.runs), default=0
            ),
            buckets=tuple(buckets),
            calls=_kernel_calls(tree, queries, cu_seqlens, split=exchange is not None),
            scatter=None if identity else torch.from_numpy(scatter).to(device),
            padded_tokens=offset,
            tree=tree,
            exchange=exchange,
        )

    @cached_property
    def alike(self) -> int:
        """Samples, where they are of one length, end to end, and share nothing; else 0."""
        if len(self.buckets) != 1 or self.scatter is not None or self.exchange is not None:
            return 0
        bucket = self.buckets[0]
        # Runs of one bucket have one parent, so that these are not on top of each other.
        plain = bucket.keys.places is None and bucket.queries.places is None
        return bucket.count if plain and bucket.keys == bucket.queries else 0

    @cached_property
    def _recurrences(self) -> dict[bool, StatePlan]:
        return {}

    def recurrence(self, any_length: bool) -> StatePlan:
        """The plan of layers with a state, made once; any_length: see there. Raises ConfigError
        where a context rank has a part of the pack."""
        if self.exchange is not None:
            raise ConfigError(
                "layers with a state are not divided over context ranks: set context_parallel to 1"
            )
        if any_length not in self._recurrences:
            device = self.cu_seqlens.device
            self._recurrences[any_length] = StatePlan.of(self.tree, device, any_length=any_length)
        return self._recurrences[any_length]

    @cached_property
    def _convolutions(self) -> dict[int, ConvolutionPlan]:
        return {}

    def convolution(self, width: int) -> ConvolutionPlan:
        """The plan of convolutions that see so many inputs; made once."""
        if width not in self._convolutions:
            device = self.cu_seqlens.device
            self._convolutions[width] = ConvolutionPlan.of(self.tree, width, device)
        return self._convolutions[width]

    def plan_states(self, widths: Sequence[int]) -> None:
        """Make ahead of their use the plans of layers with a state. widths: of their convolutions;
        none: the model has no such layers."""
        for width in widths:
            self.convolution(width)
        if widths:
            self.recurrence(kernels_found(self.cu_seqlens.device))

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything of it that lies on the device."""
        for plan in self._recurrences.values():
            yield from plan.tensors()
        for convolution in self._convolutions.values():
            yield from convolution.tensors()
        held = [self.cu_seqlens, self.scatter]
        for bucket in self.buckets:
            held += [bucket.queries.places, bucket.keys.places]
        for call in self.calls:
            held += [call.cu_seqlens, call.cu_keys, call.keys.places]
        yield from (tensor for tensor in held if tensor is not None)


@dataclass(frozen=True)
class _Queries:
    """The runs of a tree that are attended here, int64 [runs] each.

    runs: their indices in the tree. starts: their first tokens among the queries; places: among
    the keys, which is their place in the pack. sizes, parents: as in the tree.
    """

    runs: np.ndarray
    starts: np.ndarray
    places: np.ndarray
    sizes: np.ndarray
    parents: np.ndarray


def _queries_of(tree: PrefixTree, exchange: PackExchange | None) -> _Queries:
    table = np.array(
        [(run.start, run.length, run.parent) for run in tree.runs], dtype=np.int64
    ).reshape(-1, 3)
    places, sizes, parents = table.T
    runs = np.arange(len(tree.runs))
    if exchange is not None:
        owners = exchange.cut.owners[places]
        runs = np.flatnonzero(owners == exchange.place.rank)
    sizes = sizes[runs]
    # A rank's tokens are in pack order, so its runs follow each other without a gap.
    starts = np.cumsum(sizes) - sizes
    return _Queries(runs, starts, places[runs], sizes, parents[runs])


def _bucket(
    tree: PrefixTree,
    queries: _Queries,
    parent: int,
    members: np.ndarray,
    device: torch.device | str,
) -> tuple[Bucket, np.ndarray, np.ndarray]:
    """The call for these runs, which of its padded positions are real [count, length], and the
    query of each of those.
    """
    sizes, starts, places = queries.sizes[members], queries.starts[members], queries.places[members]
    steps = np.arange(int(sizes[0]))
    real = steps < sizes[:, None]
    # A padding position repeats its run's first token: any valid index will do, since nothing
    # real attends to it and its own output is dropped.
    steps = np.where(real, steps, 0)
    local, own = starts[:, None] + steps, places[:, None] + steps
    before = tree.path(parent) if parent >= 0 else np.empty(0, dtype=np.int64)
    rows = keys = Rows.at(local.reshape(-1), device)
    if before.size or not np.array_equal(local, own):
        tiled = np.tile(before, (members.size, 1))
        keys = Rows.at(np.concatenate([tiled, own], axis=1).reshape(-1), device)
    return Bucket(int(members.size), rows, keys), real, local


def _cumulative(sizes: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))


def _kernel_calls(
    tree: PrefixTree, queries: _Queries, cu_seqlens: torch.Tensor, *, split: bool
) -> tuple[KernelCall, ...]:
    """One call for all runs, or, where `split`, as many as spare copies of keys.

    The kernel takes the keys of its runs one after another. Runs of a long sample that was cut see
    overlapping stretches of the pack: each has a call of its own, which reads them where they lie.
    """
    device = cu_seqlens.device
    if not kernel_calls_wanted(device) or queries.runs.size == 0:
        return ()
    shared = bool((queries.parents >= 0).any())
    paths = [tree.path(int(run)) for run in queries.runs] if shared or split else []
    groups = _calls_without_copies(paths) if split else [range(queries.runs.size)]
    calls = []
    for group in groups:
        sizes = lengths = queries.sizes[group.start : group.stop]
        rows = keys = Rows(int(queries.starts[group.start]), int(sizes.sum()))
        cu = cu_keys = cu_seqlens if len(groups) == 1 else _cumulative(sizes).to(device)
        if paths:
            seen = [paths[index] for index in group]
            keys = Rows.at(np.concatenate(seen), device)
            lengths = np.array([p.size for p in seen])
            cu_keys = _cumulative(lengths).to(device)
        calls.append(KernelCall(rows, keys, cu, cu_keys, int(sizes.max()), int(lengths.max())))
    return tuple(calls)


def _calls_without_copies(paths: Sequence[np.ndarray]) -> list[range]:
    """Neighbours whose keys follow each other in the pack, and neighbours whose keys must be
    copied together in any case.
    """
    # None: the path has gaps.
    spans = [
        (int(path[0]), int(path[-1]) + 1) if path[-1] - path[0] + 1 == path.size else None
        for path in paths
    ]
    groups: list[range] = []
    for index, span in enumerate(spans):
        before = spans[index - 1] if index else None
        joins = before is None if span is None else before is not None and before[1] == span[0]
        if index and joins:
            groups[-1] = range(groups[-1].start, index + 1)
        else:
            groups.append(range(index, index + 1))
    return groups


def _alike(parents: np.ndarray, sizes: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Runs that one call may attend together: same parent, similar length; longest first."""
    for parent in np.unique(parents):
        members = np.flatnonzero(parents == parent)
        order = members[np.argsort(-sizes[members], kind="stable")]
        for group in group_similar(sizes, order, _NO_PADDING_FROM):
            yield int(parent), group
