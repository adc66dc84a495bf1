"""Staging: one pinned host buffer that a microbatch is packed into, and its copy on a device.

CUDA copies asynchronously only from pinned memory. Packing selects and widens what it reads, so
the pack is written straight into the pinned buffer and goes over in one transfer, instead of
page-locking the shards' mappings and transferring columns that are then packed on the device: the
columns that could go as they are cost the packing thread microseconds (5 for 16,384 tokens), about
what one transfer more costs, and the host needs some of them for its metrics.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

_ALIGNMENT = 64


class Staging:
    """Memory for the arrays of one microbatch at a time.

    `begin` makes room, `allocate` hands the room out, `send` starts the copy, `tensor` is an
    array's counterpart on the device. On a CUDA device the buffer is pinned and the copy runs on
    `stream`; elsewhere it is an ordinary copy.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._device = device
        self._stream = stream
        self._host = torch.empty(0, dtype=torch.uint8)
        self._bytes = self._host.numpy()
        self._used = 0
        self._copied: torch.cuda.Event | None = None

    def begin(self, size: int) -> None:
        """Start a microbatch of at most `size` bytes, once the last one's copy is over."""
        if self._copied is not None:
            self._copied.synchronize()
        if size > self._host.numel():
            # A quarter more, so that microbatches of nearly equal size do not pin anew each time.
            room = size + size // 4
            self._host = torch.empty(
                room, dtype=torch.uint8, pin_memory=self._device.type == "cuda"
            )
            self._bytes = self._host.numpy()
        self._used = 0

    def allocate(self, count: int, dtype: str) -> np.ndarray:
        """The next `count` elements of the buffer, uninitialised. Raises `BufferError` if full."""
        kind = np.dtype(dtype)
        start, stop = self._used, self._used + count * kind.itemsize
        if stop > self._bytes.size:
            raise BufferError(f"the microbatch needs more than the {self._bytes.size} bytes begun")
        self._used = -(-stop // _ALIGNMENT) * _ALIGNMENT
        return self._bytes[start:stop].view(kind)

    def copying(self) -> AbstractContextManager[object]:
        """Inside, other copies to the device run where this buffer's does; `send` comes after."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def send(self) -> SentBuffer:
        """Start copying everything allocated to the device."""
        host = self._host[: min(self._used, self._host.numel())]
        if self._stream is None:
            return SentBuffer(host.to(self._device, copy=True), self._bytes, None)
        with torch.cuda.stream(self._stream):
            there = host.to(self._device, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(self._stream)
        return SentBuffer(there, self._bytes, self._copied)


class SentBuffer:
    """A microbatch's bytes on the device, or on their way there."""

    def __init__(
        self, there: torch.Tensor, host: np.ndarray, copied: torch.cuda.Event | None
    ) -> None:
        self._there = there
        self._base = host.ctypes.data
        self._copied = copied

    def receive(self, others: Iterable[torch.Tensor] = ()) -> None:
        """Have this thread's current stream wait for the copy; call it before `tensor`. others:
        tensors made inside `Staging.copying`."""
        if self._copied is None:
            return
        stream = torch.cuda.current_stream(self._there.device)
        stream.wait_event(self._copied)
        # The bytes were allocated on the copying stream, which must not reuse them before this
        # stream is done with them.
        for tensor in (self._there, *others):
            tensor.record_stream(stream)

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        """The counterpart of an array that `Staging.allocate` gave."""
        start = array.ctypes.data - self._base if array.size else 0
        kind = torch.from_numpy(array[:0]).dtype
        return self._there[start : start + array.nbytes].view(kind)
