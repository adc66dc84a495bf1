"""One safetensors file that many ranks fill, each the boxes it holds, without a full copy."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence

import torch
import xxhash

from earl_core.tensors.collectives import Ranks
from earl_core.tensors.errors import WeightsError
from earl_core.tensors.safetensors_layout import DTYPE_CODES, FileLayout, TensorPlace, view
from earl_core.tensors.slices import Box, Slice, boxes_of_all, shares


def own_shares(slices: Sequence[Slice], layout: FileLayout, ranks: Ranks) -> dict[str, Box]:
    """The part of each tensor that this rank writes; ranks that hold the same split it evenly.

    Collective; the layout is equal on all ranks. Raises `WeightsError`, on all ranks, when the
    parts do not make up a tensor.
    """
    names = list(layout.places)
    boxes = boxes_of_all(slices, names, ranks)
    mine: dict[str, Box] = {}
    for name, held in zip(names, boxes, strict=True):
        parts = shares(held)
        written, wanted = sum(part.numel for part in parts), math.prod(layout.places[name].shape)
        if written != wanted:
            raise WeightsError(
                f"the ranks hold {written} elements of {name}, which has {wanted}: they do not "
                "have the same mesh"
            )
        mine[name] = parts[ranks.rank]
    return mine


@torch.no_grad()
def fill(
    memory: mmap.mmap | memoryview,
    places: Mapping[str, TensorPlace],
    slices: Sequence[Slice],
    mine: Mapping[str, Box],
) -> None:
    """Write this rank's parts into the file's memory, cast to the file's dtypes."""
    for each in slices:
        part = mine.get(each.name)
        if part is None or not part.numel:
            continue
        whole = view(memory, places[each.name])
        whole[part.index].copy_(each.tensor[part.within(each.box).index])


def digest_together(memory: memoryview, places: Mapping[str, TensorPlace], ranks: Ranks) -> str:
    """`digest_of` all tensors of the file; each rank reads its share of them. Collective."""
    loads = [0] * ranks.size
    mine: dict[str, str] = {}
    for name in sorted(places, key=lambda name: places[name].start - places[name].stop):
        reader = loads.index(min(loads))
        loads[reader] += places[name].stop - places[name].start
        if reader == ranks.rank:
            mine[name] = tensor_hash(view(memory, places[name]))
    hashes = {name: value for each in ranks.gather_json(mine) for name, value in each.items()}
    return combine(
        {name: (place.dtype, place.shape, hashes[name]) for name, place in places.items()}
    )


def tensor_hash(tensor: torch.Tensor) -> str:
    """xxh3_128 over a tensor's bytes, in hex."""
    if not tensor.numel():
        return xxhash.xxh3_128_hexdigest(b"")
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(flat.numpy().data)


def combine(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...], str]]) -> str:
    """xxh3_128 over names, dtypes, shapes and hashes of tensors, by name; 32 hex digits."""
    state = xxhash.xxh3_128()
    for name in sorted(tensors):
        dtype, shape, value = tensors[name]
        dimensions = ",".join(map(str, shape))
        state.update(f"{name}|{DTYPE_CODES[dtype]}|{dimensions}|{value}|".encode())
    return state.hexdigest()
