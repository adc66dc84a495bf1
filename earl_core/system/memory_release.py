"""Free memory of this process, given back to the host."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def give_back_free_memory() -> None:
    """Return what the C library's allocator holds but nobody uses.

    It keeps freed blocks below 32 MiB for later, gigabytes after a large microbatch, which on a CPU
    other stages cannot have meanwhile. Taking them again costs about a second for 2 GiB.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Any:
    """glibc's `malloc_trim`; other libraries have none."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
