"""Copies between a device and the host's memory: queued in pieces, converted on the device.

torch converts on the host whatever crosses, one tensor after the other and in ordinary memory.
Here half the bytes of a bfloat16 publication cross, and the bus never waits for the host. Between
tensors on the host they are the copies that torch makes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch

from earl_core.tensors.slices import BUCKET_BYTES

Wait = Callable[[], None]
_T = TypeVar("_T")
_STRIDED_AHEAD = 2  # pieces that wait in memory of their own


class Download:
    """Copies into host memory, under way until `finish`.

    Memory that is page-locked is written by the device itself. A tensor that is no range of the
    target goes through page-locked memory of its own, and from there by the host.
    """

    def __init__(self) -> None:
        self._devices: set[torch.device] = set()
        self._strided: deque[tuple[torch.Tensor, torch.Tensor, Wait]] = deque()

    @torch.no_grad()
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin to copy `source`, converted; both stay as they are until `finish`."""
        self._devices.add(source.device)
        for there, here in _pieces(target, source):
            converted = here.to(there.dtype)
            if there.is_contiguous():
                there.copy_(converted, non_blocking=True)
                continue
            if len(self._strided) == _STRIDED_AHEAD:
                self._finish_oldest()
            waiting = host_memory(converted.nbytes, source.device)
            waiting = waiting.view(converted.dtype).view(converted.shape)
            waiting.copy_(converted, non_blocking=True)
            self._strided.append((there, waiting, queued(source.device)))

    def so_far(self) -> Wait:
        """A function that waits, in any thread, for what was begun until now and is whole."""
        waits = [queued(device) for device in self._devices]

        def wait() -> None:
            for each in waits:
                each()

        return wait

    def finish(self) -> None:
        """Wait for all."""
        while self._strided:
            self._finish_oldest()
        self.so_far()()

    def _finish_oldest(self) -> None:
        target, waiting, wait = self._strided.popleft()
        wait()
        target.copy_(waiting)


@torch.no_grad()
def upload(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy (target, source) each, converted on the target's device; all are there on return.
    Page-locked sources are read by the device itself."""
    devices = set()
    for target, source in pairs:
        if not on_host(target) and source.dtype != target.dtype:
            source = source.to(target.device, non_blocking=True)
        target.copy_(source, non_blocking=True)
        devices.add(target.device)
    for device in devices:
        queued(device)()


def on_device(
    buckets: Iterable[_T],
    tensors_of: Callable[[_T], Sequence[torch.Tensor]],
    act: Callable[[_T, Sequence[torch.Tensor]], None],
    device: torch.device,
) -> None:
    """Let `act` change copies of each bucket's host tensors on the device; on return they are back.

    While it works on one, the next one comes and the one before goes back, each on a stream of its
    own, where the host's memory is page-locked. The device holds three buckets at most.
    """
    waiting, incoming, outgoing = iter(buckets), _Lane(device), _Lane(device)

    def bring() -> tuple[_T, list[torch.Tensor], torch.cuda.Event | None] | None:
        for bucket in waiting:
            # Memory of the current stream: whoever gets it next writes there behind the rest.
            here = [torch.empty_like(each, device=device) for each in tensors_of(bucket)]
            return bucket, here, incoming.copy(zip(here, tensors_of(bucket), strict=True))
        return None

    coming, leaving = bring(), None
    try:
        while coming is not None:
            (bucket, here, arrived), coming = coming, bring()
            if arrived is not None:
                torch.cuda.current_stream(device).wait_event(arrived)
            act(bucket, here)
            gone = outgoing.copy(zip(tensors_of(bucket), here, strict=True))
            if leaving is not None and leaving[1] is not None:
                # The copies of the bucket before are held until here.
                leaving[1].synchronize()
            leaving = here, gone
        if leaving is not None and leaving[1] is not None:
            leaving[1].synchronize()
    finally:
        # After an error, too, the memory of what is on its way goes to nobody before it is there.
        incoming.join()
        outgoing.join()


class _Lane:
    """Copies on a stream beside the device's current one; without streams they are made at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.cuda.Event | None:
        """Begin to copy (target, source) each, behind what is on the current stream by now. Both
        must be held until the event."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return None if self._stream is None else self._stream.record_event()

    def join(self) -> None:
        """Let what the current stream does from now on wait for all copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def bytes_on_host(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bytes of a device's tensor, uint8, piece by piece in one memory of this thread."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    room = getattr(_own, "room", None)
    if room is None:
        room = _own.room = host_memory(BUCKET_BYTES, tensor.device)
    for piece in torch.split(flat, BUCKET_BYTES):
        here = room[: piece.numel()]
        here.copy_(piece, non_blocking=True)
        queued(tensor.device)()
        yield here


def on_host(tensor: torch.Tensor) -> bool:
    """Tell whether the host itself reads and writes the tensor."""
    return tensor.device.type == "cpu"


def host_memory(size: int, device: torch.device) -> torch.Tensor:
    """So many bytes, uint8, that the device copies from and to by itself."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


def queued(device: torch.device) -> Wait:
    """A function that waits for what is queued on the device's current stream by now."""
    if device.type != "cuda":
        return _nothing
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


_own = threading.local()


def _pieces(
    target: torch.Tensor, source: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both cut along the first dimension, so that a piece has about `BUCKET_BYTES`."""
    if target.nbytes <= BUCKET_BYTES:
        yield target, source
        return
    rows = max(1, BUCKET_BYTES * len(target) // target.nbytes)
    yield from zip(torch.split(target, rows), torch.split(source, rows), strict=True)


def _nothing() -> None:
    pass
