"""Boxes of each whole tensor that a rank holds, however the mesh cut it.

Weights and optimizer state are cut by tensor parallelism (`Shard` on any dimension) and then by
FSDP2 (`Shard`, or `_StridedShard` where both cut the same dimension; the order is then from the
last mesh dimension to the first: https://github.com/pytorch/pytorch/pull/127697). Every such part
is a box: a contiguous range in each dimension. Files and new meshes only need boxes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from earl_core.tensors.collectives import Ranks

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Box:
    """[offset, offset + sizes) in each dimension of a whole tensor; () for a scalar."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Elements in the box; 1 for a scalar's."""
        return math.prod(self.sizes)

    @property
    def index(self) -> tuple[slice, ...]:
        """`whole[box.index]` is the box."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.sizes, strict=True))

    def intersect(self, other: Box) -> Box:
        """Return the box that lies in both; one without elements where they do not meet."""
        start = tuple(map(max, self.offset, other.offset))
        stop = tuple(map(min, self._stop, other._stop))
        return Box(start, tuple(max(0, b - a) for a, b in zip(start, stop, strict=True)))

    def within(self, outer: Box) -> Box:
        """This box counted from the outer one's first element."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.sizes)

    def part(self, number: int, parts: int) -> Box:
        """One of `parts` near-equal ranges, in order; together they are the box. They divide the
        first dimension that is long enough, else the longest. A scalar goes to the first."""
        if not self.sizes:
            return self if number == 0 else Box((0,), (0,))
        long_enough = (each for each, size in enumerate(self.sizes) if size >= parts)
        cut = next(long_enough, self.sizes.index(max(self.sizes)))
        start, stop = (self.sizes[cut] * each // parts for each in (number, number + 1))
        offset, sizes = list(self.offset), list(self.sizes)
        offset[cut] += start
        sizes[cut] = stop - start
        return Box(tuple(offset), tuple(sizes))

    @property
    def _stop(self) -> tuple[int, ...]:
        return tuple(o + n for o, n in zip(self.offset, self.sizes, strict=True))


@dataclass(frozen=True)
class Slice:
    """One rank's box of the tensor `name` of `shape`; `tensor` holds it and shares its memory."""

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor


def slices_of(named: Mapping[str, torch.Tensor]) -> list[Slice]:
    """This rank's slice of each tensor: all of a plain one, the local part of a DTensor. Raises
    ValueError for a DTensor that is cut in no box, or that is a sum over ranks."""
    return [
        Slice(name, tuple(tensor.shape), local_box(tensor), local_part(tensor))
        for name, tensor in named.items()
    ]


def slices_like(
    holders: Mapping[str, torch.Tensor], parts: Iterable[tuple[str, str, torch.Tensor]]
) -> list[Slice]:
    """Slices of tensors that are cut like others: (holder's name, own name, local part). A part
    with the shape of the holder's local part is cut like it; any other is whole."""
    slices = []
    for holder, name, part in parts:
        like = holders[holder]
        box = local_box(like)
        cut = tuple(part.shape) == box.sizes
        shape = tuple(like.shape) if cut else tuple(part.shape)
        slices.append(Slice(name, shape, box if cut else Box.whole(shape), part.detach()))
    return slices


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor, detached, that shares memory with what this rank holds."""
    if is_distributed(tensor):
        tensor = tensor.to_local()  # type: ignore[attr-defined]
    return tensor.detach()


def is_distributed(tensor: torch.Tensor) -> bool:
    """Tell whether this is a DTensor; the class is not imported for plain tensors."""
    return type(tensor) is not torch.Tensor and hasattr(tensor, "device_mesh")


def local_box(tensor: torch.Tensor) -> Box:
    """The box of a tensor that this rank holds."""
    if not is_distributed(tensor):
        return Box.whole(tensor.shape)
    box = _box_of_cut(tensor)  # type: ignore[arg-type]
    found = tuple(tensor.to_local().shape)  # type: ignore[attr-defined]
    if found != box.sizes and (box.numel or math.prod(found)):
        raise ValueError(
            f"a tensor of shape {list(tensor.shape)} with {tensor.placements} should have "  # type: ignore[attr-defined]
            f"{list(box.sizes)} on this rank, but has {list(found)}: it is cut in another way"
        )
    return box


def _box_of_cut(tensor: DTensor) -> Box:
    """Repeat the cuts in the order in which they were made."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    offset, sizes = [0] * tensor.ndim, list(tensor.shape)
    if coordinate is None:
        return Box(tuple(offset), (0,) * tensor.ndim)
    cuts = []
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise ValueError("a tensor that is a sum over ranks is no slice: reduce it first")
        if not placement.is_replicate():
            # FSDP cuts what tensor parallelism has cut before.
            strided = hasattr(placement, "split_factor")
            cuts.append((strided, dimension, int(placement.dim)))  # type: ignore[attr-defined]
    for _, dimension, cut in sorted(cuts):
        # The chunks of torch.chunk: all alike but the last ones, which may be empty.
        chunk = -(-sizes[cut] // mesh.size(dimension))
        start = min(coordinate[dimension] * chunk, sizes[cut])
        offset[cut] += start
        sizes[cut] = min(chunk, sizes[cut] - start)
    return Box(tuple(offset), tuple(sizes))


def boxes_of_all(slices: Sequence[Slice], names: Sequence[str], ranks: Ranks) -> list[list[Box]]:
    """Return, for each name in order, the box of each rank. Collective; a rank may lack some names.
    `names` must be equal on all ranks. A lacking tensor gives a box without elements."""
    own = {each.name: each.box for each in slices}
    widest = torch.tensor([max((len(own[n].sizes) for n in names if n in own), default=0)])
    width = max(int(each) for each in ranks.gather(widest))
    # A row: dimensions, offsets, sizes; -1 dimensions where the rank has nothing.
    table = torch.zeros(len(names), 1 + 2 * width, dtype=torch.int64)
    for row, name in enumerate(names):
        box = own.get(name)
        if box is None:
            table[row, 0] = -1
            continue
        count = len(box.sizes)
        table[row, : 1 + 2 * count] = torch.tensor([count, *box.offset, *box.sizes])
    tables = [each.tolist() for each in ranks.gather(table)]
    return [[_box_of_row(each[row]) for each in tables] for row in range(len(names))]


def _box_of_row(row: list[int]) -> Box:
    count = row[0]
    if count < 0:
        return Box((0,), (0,))
    return Box(tuple(row[1 : 1 + count]), tuple(row[1 + count : 1 + 2 * count]))


def shares(boxes: Sequence[Box]) -> list[Box]:
    """For each rank the part of its box that it speaks for; together they are all boxes, once.
    boxes: of one tensor, by rank. Ranks that hold the same box split it evenly."""
    holders: dict[Box, list[int]] = {}
    for rank, box in enumerate(boxes):
        holders.setdefault(box, []).append(rank)
    return [box.part(holders[box].index(rank), len(holders[box])) for rank, box in enumerate(boxes)]


_T = TypeVar("_T")

BUCKET_BYTES = 2**26
"""Large enough for a network or a bus, small next to a model."""


def buckets(
    items: Iterable[_T], nbytes: Callable[[_T], int], most: int = BUCKET_BYTES
) -> Iterator[list[_T]]:
    """The items in order, in lists of at most `most` bytes; one that is larger is alone in its."""
    bucket: list[_T] = []
    size = 0
    for item in items:
        if bucket and size + nbytes(item) > most:
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += nbytes(item)
    if bucket:
        yield bucket
