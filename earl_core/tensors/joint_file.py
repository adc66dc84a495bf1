"""Safetensors files that many ranks fill, each the boxes it holds, without a full copy.

Where the ranks are on several hosts, each host has a file of its own, with all tensors or with
those dealt to it. What none of its ranks holds is sent to the first of them, each element once.
"""

from __future__ import annotations

import math
import mmap
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import xxhash

from earl_core.tensors.collectives import Ranks
from earl_core.tensors.errors import WeightsError
from earl_core.tensors.safetensors_layout import DTYPE_CODES, TensorPlace, view
from earl_core.tensors.slices import Box, Slice, boxes_of_all, shares


class Transfer(NamedTuple):
    """A part of a tensor that rank `source` sends to rank `target`, which writes it."""

    name: str
    box: Box
    source: int
    target: int


class Shares(NamedTuple):
    """mine: the part of each tensor that this rank writes. transfers: of all ranks, in one
    order."""

    mine: dict[str, Box]
    transfers: list[Transfer]


def own_shares(
    slices: Sequence[Slice],
    places: Mapping[str, TensorPlace],
    ranks: Ranks,
    *,
    writers: Mapping[str, str] | None = None,
) -> Shares:
    """Who writes what; ranks of a host that hold the same split it evenly.

    writers: the host that writes each tensor; none: every host writes all. Collective; places and
    writers are equal on all ranks. Raises `WeightsError`, on all ranks, when the parts do not make
    up a tensor.
    """
    names = list(places)
    boxes = boxes_of_all(slices, names, ranks)
    hosts = ranks.hosts
    every = list(dict.fromkeys(hosts))
    mine: dict[str, Box] = {}
    transfers: list[Transfer] = []
    for name, held in zip(names, boxes, strict=True):
        for host in every if writers is None else [writers[name]]:
            parts = shares(_nearest(held, hosts, host))
            written = sum(part.numel for part in parts)
            wanted = math.prod(places[name].shape)
            if written != wanted:
                raise WeightsError(
                    f"the ranks hold {written} elements of {name}, which has {wanted}: they do not "
                    "have the same mesh"
                )
            if host == hosts[ranks.rank]:
                mine[name] = parts[ranks.rank]
            transfers += [
                Transfer(name, part, rank, hosts.index(host))
                for rank, part in enumerate(parts)
                if hosts[rank] != host and part.numel
            ]
    return Shares(mine, transfers)


def _nearest(held: Sequence[Box], hosts: Sequence[str], host: str) -> list[Box]:
    """Boxes of the ranks without those that a rank of this host holds, too."""
    pairs = list(zip(held, hosts, strict=True))
    here = {box for box, own in pairs if own == host}
    none = (0,) * max(1, len(held[0].sizes))
    return [box if own == host or box not in here else Box(none, none) for box, own in pairs]


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


_PIECE_BYTES = 4 << 20
"""Of one message. While a large one goes one way, gloo keeps what goes the other way waiting: both
ways of a link of 1 Gbit/s took 1.5 times their time with messages of 28 MB, 1.1 with these."""
_IN_FLIGHT_BYTES = 64 << 20
"""Of messages that one rank sends and receives at once: enough for both ways to be busy."""


@torch.no_grad()
def transfer(
    memory: mmap.mmap | memoryview | None,
    places: Mapping[str, TensorPlace],
    slices: Sequence[Slice],
    transfers: Sequence[Transfer],
    ranks: Ranks,
) -> None:
    """Send what other hosts lack and write what this one lacks. Collective; holds one part more
    than 64 MiB of them.

    memory: of this host's file; None where it has none.
    """
    held = {each.name: each for each in slices}
    under_way: deque[tuple[dist.Work, torch.Tensor, Callable[[], object] | None]] = deque()
    in_flight = 0

    def finish(limit: int) -> None:
        # The oldest first: its partner waits for nothing that is younger.
        nonlocal in_flight
        while under_way and in_flight > limit:
            work, piece, landed = under_way.popleft()
            work.wait()
            in_flight -= piece.nbytes
            if landed is not None:
                landed()

    def move(
        way: Callable[[torch.Tensor, int], dist.Work],
        part: torch.Tensor,
        partner: int,
        landed: Callable[[], object] | None = None,
    ) -> None:
        nonlocal in_flight
        pieces = torch.split(part.view(-1), _PIECE_BYTES // part.itemsize)
        for piece in pieces:
            finish(_IN_FLIGHT_BYTES - piece.nbytes)
            last = landed if piece is pieces[-1] else None
            under_way.append((way(piece, partner), piece, last))
            in_flight += piece.nbytes

    for name, box, source, to in transfers:
        place = places[name]
        if ranks.rank == source:
            part = held[name].tensor[box.within(held[name].box).index]
            move(ranks.send, part.to("cpu", place.dtype).contiguous(), to)
        elif ranks.rank == to and memory is not None:
            target = view(memory, place)[box.index]
            if target.is_contiguous():
                move(ranks.receive, target, source)
            else:
                part = torch.empty(box.sizes, dtype=place.dtype)
                move(ranks.receive, part, source, partial(target.copy_, part))
    finish(-1)


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
