"""A stand-in for the CUDA runtime's calls about host memory, which asks the kernel's map."""

from __future__ import annotations

from pathlib import Path

import pytest

from earl_core.dispatch.segments import page_lock

READ_ONLY = 0x08
INVALID, ALREADY, UNKNOWN = 1, 712, 713


class Runtime:
    """Registers ranges as cudaHostRegister is documented to. code: what it gives instead of 0.

    ranges: size and flags by address, of what is registered. calls: addresses ever registered.
    """

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.ranges: dict[int, tuple[int, int]] = {}
        self.calls: list[int] = []

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:  # noqa: N802
        self.calls.append(pointer)
        if pointer in self.ranges:
            return ALREADY
        # A lock on a private mapping would copy it; one of memory that cannot be written has to
        # say so.
        if permissions(pointer, size) != ("r--s" if flags == READ_ONLY else "rw-s"):
            return INVALID
        if not self.code:
            self.ranges[pointer] = (size, flags)
        return self.code

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802
        assert permissions(pointer, 1) != "", "it was unmapped before"
        return UNKNOWN if self.ranges.pop(pointer, None) is None else 0

    def covers(self, pointer: int, size: int) -> bool:
        """Whether a copy of these bytes would be asynchronous."""
        return any(
            start <= pointer and pointer + size <= start + length
            for start, (length, _) in self.ranges.items()
        )


def permissions(pointer: int, size: int) -> str:
    """Of the mapping that holds the range, as in "rw-s"; nothing where none does."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, found, *_ = line.split()
        start, stop = (int(each, 16) for each in place.split("-"))
        if start <= pointer and pointer + size <= stop:
            return found
    return ""


def stand_in(patch: pytest.MonkeyPatch, code: int = 0) -> Runtime:
    """Have this process use a GPU, as far as page locks ask."""
    runtime = Runtime(code)
    patch.setattr(page_lock, "cudart", lambda: runtime)
    return runtime
