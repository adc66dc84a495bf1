"""Mappings that a GPU copies from and to by itself: page-locked, once, for as long as they stay.

CUDA copies asynchronously, and at the speed of the bus, only where it knows the memory. Making
it known takes longer than a copy, so a lock belongs to a mapping, which this process keeps by
inode while the segment is released and used again, and ends with it.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
import threading
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

logger = logging.getLogger(__name__)

_READ_ONLY = 0x08  # cudaHostRegisterReadOnly; a mapping that cannot be written needs it


class Cudart(Protocol):
    """The CUDA runtime's part that is used; both functions return a `cudaError`, 0 for success."""

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> Any: ...  # noqa: N802

    def cudaHostUnregister(self, pointer: int) -> Any: ...  # noqa: N802


def cudart() -> Cudart | None:
    """The CUDA runtime of this process; None where nothing has used a GPU yet, because the question
    alone would take one."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    runtime: Cudart = torch.cuda.cudart()
    return runtime


class PageLock:
    """The lock of one mapping. read_only: whether it cannot be written."""

    def __init__(self, mapping: mmap.mmap, *, read_only: bool = False) -> None:
        self._mapping = mapping
        self._flags = _READ_ONLY if read_only else 0
        self._pid = os.getpid()
        self._changing = threading.Lock()
        self._runtime: Cudart | None = None
        self._refused = False

    @property
    def held(self) -> bool:
        """True while the mapping is page-locked."""
        return self._runtime is not None

    def take(self) -> bool:
        """Page-lock the mapping where a GPU is in use; true when it is locked."""
        with self._changing:
            if self._runtime is None and not self._refused:
                runtime = cudart()
                if runtime is not None:
                    self._register(runtime)
            return self._runtime is not None

    def release(self) -> None:
        """Release the lock before the memory is unmapped. In a forked child nothing happens: the
        lock is not its."""
        with self._changing:
            runtime, self._runtime = self._runtime, None
            if runtime is not None and self._pid == os.getpid():
                runtime.cudaHostUnregister(self._address())

    def _register(self, runtime: Cudart) -> None:
        size = len(self._mapping)
        code = int(runtime.cudaHostRegister(self._address(), size, self._flags))
        if code == 0:
            self._runtime = runtime
            return
        self._refused = True
        logger.warning(
            "CUDA cannot page-lock a segment of %s bytes (error %d): copies go through ordinary "
            "memory, which is several times slower", f"{size:,}", code
        )  # fmt: skip
        _forget_error()

    def _address(self) -> int:
        return int(np.frombuffer(self._mapping, dtype=np.uint8).ctypes.data)


def _forget_error() -> None:
    """CUDA gives the error of a failed call to the next kernel too: let that be one of ours."""
    torch: Any = sys.modules["torch"]
    with suppress(RuntimeError, AssertionError):
        torch.zeros(1, device="cuda")
