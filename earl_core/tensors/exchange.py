"""Move tensors between ranks from one set of boxes to another, a little at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from earl_core.tensors.slices import Box, shares

# Large messages are slower than a few of this size, which stay in the caches.
_STEP_BYTES = 8 * 2**20


class BoxExchange:
    """Gives each rank the boxes that it wants, straight from the ranks that hold them.

    A tensor goes in steps, each at most an eighth of the largest tensor, so that the buffer for
    what is in flight is small beside it; nothing is gathered whole. largest: bytes of the largest
    whole tensor that will be moved; equal on all ranks.

    held_bytes: of all results, less what was given back (`drop`). peak_bytes: the most that they
    and the buffer ever were together. moved_bytes: received from other ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None, largest: int) -> None:
        self._group = group
        self._rank = 0 if group is None else group.rank()
        self._memory: dict[torch.device, torch.Tensor] = {}
        self._step = max(1, min(_STEP_BYTES, largest // 8))
        self.moved_bytes = 0
        self.peak_bytes = 0
        self.held_bytes = 0

    @torch.no_grad()
    def move(
        self, old: torch.Tensor, held: Sequence[Box], wanted: Sequence[Box], shape: Sequence[int]
    ) -> torch.Tensor:
        """The wanted box of the whole tensor of `shape`; `old` itself where it is the held one.

        held, wanted: each rank's box, equal on all ranks. Collective. Where a rank holds what it
        wants nothing is sent to it. `old` stays as it is.
        """
        have, want = held[self._rank], wanted[self._rank]
        sources = shares(held)
        if have == want:
            new = old
        else:
            new = torch.empty(want.sizes, dtype=old.dtype, device=old.device)
            self._hold(new.nbytes)
            common = have.intersect(want)
            if common.numel:
                new[common.within(want).index] = old[common.within(have).index]
        steps = math.ceil(math.prod(shape) * old.itemsize / self._step) or 1
        if self._group is not None and _any_moves(sources, held, wanted):
            for step in range(steps):
                parts = [source.part(step, steps) for source in sources]
                self._exchange(old, new, parts, held, wanted)
        return new

    def drop(self, tensor: torch.Tensor) -> None:
        """Say that the memory of a tensor was given back."""
        self._hold(-tensor.nbytes)

    def _exchange(
        self,
        old: torch.Tensor,
        new: torch.Tensor,
        parts: Sequence[Box],
        held: Sequence[Box],
        wanted: Sequence[Box],
    ) -> None:
        """Each rank sends of its part what others want and do not hold. Contiguous parts go
        straight from `old` into `new`, the rest through a buffer."""
        rank, have, want = self._rank, held[self._rank], wanted[self._rank]
        leaving: list[tuple[int, torch.Tensor]] = []
        coming: list[tuple[int, torch.Tensor]] = []
        for peer, part in enumerate(parts):
            box = _piece(parts[rank], have, held[peer], wanted[peer])
            if box is not None:
                leaving.append((peer, old[box.within(have).index]))
            box = _piece(part, held[peer], have, want)
            if box is not None:
                coming.append((peer, new[box.within(want).index]))
        buffers = self._buffers([each for _, each in (*leaving, *coming)])
        operations = []
        for (peer, values), buffer in zip(leaving, buffers, strict=False):
            sent = values if buffer is values else buffer.copy_(values)
            operations.append(dist.P2POp(dist.isend, sent, group=self._group, group_peer=peer))
        arriving = buffers[len(leaving) :]
        for (peer, _), buffer in zip(coming, arriving, strict=True):
            operations.append(dist.P2POp(dist.irecv, buffer, group=self._group, group_peer=peer))
            self.moved_bytes += buffer.nbytes
        for request in dist.batch_isend_irecv(operations) if operations else ():
            request.wait()
        for (_, values), buffer in zip(coming, arriving, strict=True):
            if buffer is not values:
                values.copy_(buffer)

    def _buffers(self, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each piece itself if it is contiguous, else memory like it, which every step uses."""
        needed = [0 if each.is_contiguous() else _aligned(each.nbytes) for each in pieces]
        if not sum(needed):
            return list(pieces)
        device = pieces[0].device  # optimizer state may lie in the host's memory
        memory = self._memory.pop(device, None)
        if memory is None or memory.nbytes < sum(needed):
            del memory  # before the larger one is made
            memory = torch.empty(sum(needed), dtype=torch.uint8, device=device)
        self._memory[device] = memory
        self._hold(0)
        buffers, start = [], 0
        for each, size in zip(pieces, needed, strict=True):
            own = memory[start : start + each.nbytes]
            buffers.append(own.view(each.dtype).view(each.shape) if size else each)
            start += size
        return buffers

    def _hold(self, change: int) -> None:
        self.held_bytes += change
        buffered = sum(memory.nbytes for memory in self._memory.values())
        self.peak_bytes = max(self.peak_bytes, self.held_bytes + buffered)


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


def _piece(part: Box, source: Box, have: Box, want: Box) -> Box | None:
    """Return the piece of a source's part that a rank gets; None where the rank holds the same box,
    or does not want it."""
    if source == have or have == want or not part.numel:
        return None
    box = part.intersect(want)
    return box if box.numel else None


def _any_moves(sources: Sequence[Box], held: Sequence[Box], wanted: Sequence[Box]) -> bool:
    return any(
        _piece(part, held[at], have, want) is not None
        for at, part in enumerate(sources)
        for have, want in zip(held, wanted, strict=True)
    )
