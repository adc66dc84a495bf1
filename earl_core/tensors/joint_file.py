"""Safetensors files that many ranks fill, each the boxes it holds, without a full copy.

Where the ranks are on several hosts, each host has a file of its own, with all tensors or with
those dealt to it. Elements that none of its ranks holds are sent to the first of them, each once.
"""

from __future__ import annotations

import math
import mmap
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import torch
import torch.distributed as dist

from earl_core.tensors.collectives import Ranks
from earl_core.tensors.device_copies import Download, Wait, on_host
from earl_core.tensors.errors import WeightsError
from earl_core.tensors.hashing import TensorHashes, combine
from earl_core.tensors.safetensors_layout import TensorPlace, view
from earl_core.tensors.slices import Box, Slice, boxes_of_all, shares


class Transfer(NamedTuple):
    """A part of a tensor that rank `source` sends to rank `target`, which writes it."""

    name: str
    box: Box
    source: int
    target: int


class Shares(NamedTuple):
    """mine: the part of each tensor that this rank writes. transfers: of all ranks, in one
    order. alone: the rank of this host that writes all of a tensor, where one does."""

    mine: dict[str, Box]
    transfers: list[Transfer]
    alone: dict[str, int]


def own_shares(
    slices: Sequence[Slice],
    places: Mapping[str, TensorPlace],
    ranks: Ranks,
    *,
    writers: Mapping[str, str] | None = None,
) -> Shares:
    """Divide writing among ranks; ranks of a host that hold the same split it evenly.

    writers: the host that writes each tensor; none: every host writes all. Collective; places and
    writers are equal on all ranks. Raises `WeightsError` on all ranks if parts make no tensor.
    """
    names = list(places)
    boxes = boxes_of_all(slices, names, ranks)
    hosts = ranks.hosts
    every = list(dict.fromkeys(hosts))
    mine: dict[str, Box] = {}
    transfers: list[Transfer] = []
    alone: dict[str, int] = {}
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
                sizes = [p.numel if at == host else 0 for p, at in zip(parts, hosts, strict=True)]
                if wanted and max(sizes) == wanted:
                    alone[name] = sizes.index(wanted)
            transfers += [
                Transfer(name, part, rank, hosts.index(host))
                for rank, part in enumerate(parts)
                if hosts[rank] != host and part.numel
            ]
    return Shares(mine, transfers, alone)


def _nearest(held: Sequence[Box], hosts: Sequence[str], host: str) -> list[Box]:
    """Boxes of the ranks without those that a rank of this host holds, too."""
    pairs = list(zip(held, hosts, strict=True))
    here = {box for box, own in pairs if own == host}
    none = (0,) * max(1, len(held[0].sizes))
    return [box if own == host or box not in here else Box(none, none) for box, own in pairs]


@torch.no_grad()
def write_shares(
    memory: mmap.mmap | memoryview,
    places: Mapping[str, TensorPlace],
    slices: Sequence[Slice],
    found: Shares,
    ranks: Ranks,
    written: Callable[[str, Wait], None] | None = None,
) -> None:
    """Write this rank's parts into its host's file, cast to the file's dtypes, while parts that
    hosts lack are sent and received.

    written(name, wait) is called for each tensor of a device of which this rank is the only writer;
    its bytes are there when `wait` returns. Collective where there are transfers. An error is
    raised when nothing is under way: the ranks that this one sends to would wait for it.
    """
    held = {each.name: each for each in slices}
    own = deque((name, part) for name, part in found.mine.items() if part.numel)
    error: Exception | None = None
    download = Download()

    def write_next() -> None:
        nonlocal error
        name, part = own.popleft()
        try:
            write_part(view(memory, places[name]), held[name], part, download)
            alone = found.alone.get(name) == ranks.rank
            # What the host copies itself is not hashed meanwhile, because its cores are busy.
            if written is not None and alone and not on_host(held[name].tensor):
                written(name, download.so_far())
        except Exception as caught:
            error = caught
            own.clear()

    _Messages(memory, places, held, found.transfers, ranks).exchange(
        lambda: write_next() if own else None
    )
    while own:
        write_next()
    download.finish()
    if error is not None:
        raise error


def write_part(whole: torch.Tensor, held: Slice, part: Box, download: Download) -> None:
    """Copy a part of what a rank holds to its place in the whole tensor, cast to its dtype; from a
    device it is there when the download is."""
    target, source = whole[part.index], held.tensor[part.within(held.box).index]
    if on_host(source):
        target.copy_(source)
    else:
        download.copy(target, source)


_PIECE_BYTES = 4 << 20
_RECEIVES_AHEAD, _SENDS_AHEAD = 16, 8
"""Pieces after the oldest one under way. gloo asks for each message before it is sent, and the
question waits behind what its rank is sending: with many sends before it the other way stands still
(both ways of a link of 1 Gbit/s then took 1.2 to 1.5 times their time)."""


class _Piece(NamedTuple):
    """Elements [start, stop) of a part; offset: bytes that go before it from source to target."""

    offset: int
    source: int
    target: int
    name: str
    box: Box
    start: int
    stop: int


class _Messages:
    """All that this rank sends and receives. All ranks take pieces in one order and wait for the
    oldest first, which is under way at both of its ends: so none waits forever."""

    def __init__(
        self,
        memory: mmap.mmap | memoryview,
        places: Mapping[str, TensorPlace],
        held: Mapping[str, Slice],
        transfers: Sequence[Transfer],
        ranks: Ranks,
    ) -> None:
        self._memory, self._places, self._held, self._ranks = memory, places, held, ranks
        self._pieces = sorted(self._own_pieces(transfers), key=lambda each: each[:3])
        self._left = Counter((each.name, each.box) for each in self._pieces)
        self._parts: dict[tuple[str, Box], torch.Tensor] = {}

    def exchange(self, meanwhile: Callable[[], None]) -> None:
        """Send and receive all; meanwhile is called before each wait."""
        under_way: dict[int, dist.Work] = {}
        ahead = {True: iter(enumerate(self._pieces)), False: iter(enumerate(self._pieces))}
        for number, piece in enumerate(self._pieces):
            for received, count in ((True, _RECEIVES_AHEAD), (False, _SENDS_AHEAD)):
                until = count + 1 if number == 0 else 1
                for later, each in islice(ahead[received], until):
                    if received == (each.target == self._ranks.rank):
                        under_way[later] = self._begin(each)
            meanwhile()
            under_way.pop(number).wait()
            self._finish(piece)

    def _own_pieces(self, transfers: Sequence[Transfer]) -> Iterator[_Piece]:
        offsets: Counter[tuple[int, int]] = Counter()
        for name, box, source, target in transfers:
            if self._ranks.rank in (source, target):
                size = self._places[name].dtype.itemsize
                count = _PIECE_BYTES // size
                for start in range(0, box.numel, count):
                    stop = min(start + count, box.numel)
                    before = offsets[source, target]
                    yield _Piece(before, source, target, name, box, start, stop)
                    offsets[source, target] += (stop - start) * size

    def _begin(self, piece: _Piece) -> dist.Work:
        key = (piece.name, piece.box)
        if key not in self._parts:
            self._parts[key] = self._part(piece).view(-1)
        elements = self._parts[key][piece.start : piece.stop]
        if piece.source == self._ranks.rank:
            return self._ranks.send(elements, piece.target)
        return self._ranks.receive(elements, piece.source)

    def _part(self, piece: _Piece) -> torch.Tensor:
        """Contiguous memory of the part: sent from, or received into."""
        if piece.source == self._ranks.rank:
            held = self._held[piece.name]
            part = held.tensor[piece.box.within(held.box).index]
            return part.to(self._places[piece.name].dtype).cpu().contiguous()
        target = self._target(piece)
        return target if target.is_contiguous() else torch.empty(target.shape, dtype=target.dtype)

    def _finish(self, piece: _Piece) -> None:
        key = (piece.name, piece.box)
        self._left[key] -= 1
        if self._left[key]:
            return
        part = self._parts.pop(key)
        if piece.target == self._ranks.rank and not self._target(piece).is_contiguous():
            self._target(piece).copy_(part.view(piece.box.sizes))

    def _target(self, piece: _Piece) -> torch.Tensor:
        return view(self._memory, self._places[piece.name])[piece.box.index]


def digest_together(
    memory: memoryview,
    places: Mapping[str, TensorPlace],
    shares: Shares,
    hashes: TensorHashes,
    ranks: Ranks,
) -> str:
    """`digest_of` all tensors of a host's file, of which its ranks read each a share, once.

    hashes: may have been given already what this rank alone has written. Collective; raises
    `WeightsError`, on all ranks, when hosts have different bytes.
    """
    here = ranks.hosts[ranks.rank]
    loads = {rank: 0 for rank, host in enumerate(ranks.hosts) if host == here}
    sizes = {name: place.stop - place.start for name, place in places.items()}
    readers = dict(shares.alone)
    for name, reader in readers.items():
        loads[reader] += sizes[name]
    for name in sorted(places.keys() - readers.keys(), key=lambda name: (-sizes[name], name)):
        readers[name] = min(loads, key=lambda rank: loads[rank])
        loads[readers[name]] += sizes[name]
    for name, reader in readers.items():
        if reader == ranks.rank and name not in hashes:
            hashes.start(name, view(memory, places[name]))
    found: dict[str, dict[str, str]] = {host: {} for host in ranks.hosts}
    for host, each in zip(ranks.hosts, ranks.gather_json(hashes.results()), strict=True):
        found[host] |= each
    digests = {
        combine({name: (place.dtype, place.shape, own[name]) for name, place in places.items()})
        for own in found.values()
    }
    if len(digests) > 1:
        raise WeightsError(
            f"the hosts {', '.join(found)} have different bytes of the weights just written: "
            "their memory or their network is at fault"
        )
    return digests.pop()
