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


_PIECE_BYTES = 4 << 20
"""Of one message. While a large one goes one way, gloo keeps what goes the other way waiting: both
ways of a link of 1 Gbit/s took 1.5 times their time with messages of 28 MB, 1.1 with these."""
_IN_FLIGHT_BYTES = 64 << 20
"""Of messages that one rank sends and receives at once: enough for both ways to be busy."""


@torch.no_grad()
def write_shares(
    memory: mmap.mmap | memoryview,
    places: Mapping[str, TensorPlace],
    slices: Sequence[Slice],
    found: Shares,
    ranks: Ranks,
) -> None:
    """Write this rank's parts into its host's file, cast to the file's dtypes, while parts that
    hosts lack are sent and received. Holds one part more than 64 MiB of the latter.

    Collective where there are transfers. An error is raised when nothing is under way any more:
    the ranks that this one sends to would wait for it.
    """
    held = {each.name: each for each in slices}
    own = deque((name, part) for name, part in found.mine.items() if part.numel)
    error: Exception | None = None

    def write_next() -> None:
        nonlocal error
        name, part = own.popleft()
        try:
            write_part(view(memory, places[name]), held[name], part)
        except Exception as caught:
            error = caught
            own.clear()

    messages = _Messages(ranks, lambda: write_next() if own else None)
    for name, part, source, target in found.transfers:
        place = places[name]
        if ranks.rank == source:
            sent = held[name].tensor[part.within(held[name].box).index]
            messages.send(sent.to("cpu", place.dtype).contiguous(), target)
        elif ranks.rank == target:
            messages.receive(view(memory, place)[part.index], source)
    while own:
        write_next()
    messages.finish()
    if error is not None:
        raise error


def write_part(whole: torch.Tensor, held: Slice, part: Box) -> None:
    """Copy a part of what a rank holds to its place in the whole tensor, cast to its dtype."""
    whole[part.index].copy_(held.tensor[part.within(held.box).index])


class _Messages:
    """Parts under way to and from other ranks, oldest first. meanwhile: what is done before each
    wait."""

    def __init__(self, ranks: Ranks, meanwhile: Callable[[], None]) -> None:
        self._ranks, self._meanwhile = ranks, meanwhile
        self._under_way: deque[tuple[dist.Work, torch.Tensor, Callable[[], object] | None]]
        self._under_way = deque()
        self._bytes = 0

    def send(self, part: torch.Tensor, target: int) -> None:
        self._move(self._ranks.send, part, target)

    def receive(self, target: torch.Tensor, source: int) -> None:
        """Into a tensor that need not be contiguous."""
        if target.is_contiguous():
            self._move(self._ranks.receive, target, source)
        else:
            part = torch.empty(target.shape, dtype=target.dtype)
            self._move(self._ranks.receive, part, source, partial(target.copy_, part))

    def finish(self, most: int = 0) -> None:
        """Wait until no more than that many bytes are under way."""
        # The oldest first: its partner waits for nothing that is younger.
        while self._under_way and self._bytes > most:
            self._meanwhile()
            work, piece, landed = self._under_way.popleft()
            work.wait()
            self._bytes -= piece.nbytes
            if landed is not None:
                landed()

    def _move(
        self,
        way: Callable[[torch.Tensor, int], dist.Work],
        part: torch.Tensor,
        partner: int,
        landed: Callable[[], object] | None = None,
    ) -> None:
        pieces = torch.split(part.view(-1), _PIECE_BYTES // part.itemsize)
        for piece in pieces:
            self.finish(_IN_FLIGHT_BYTES - piece.nbytes)
            last = landed if piece is pieces[-1] else None
            self._under_way.append((way(piece, partner), piece, last))
            self._bytes += piece.nbytes


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
