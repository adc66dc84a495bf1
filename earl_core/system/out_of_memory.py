"""Running out of memory: one typed error for every stage, and how allocators say it.

Controllers, engines and learners share it.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from earl_core.system.errors import EarlError

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_ASKED = re.compile(r"(?:allocate|mmap) ([\d.]+) (bytes|[KMGTP]iB)")
_REFUSALS = re.compile(
    r"DefaultCPUAllocator|can't allocate memory|not enough memory|Cannot allocate memory"
    r"|(?:CUDA|HIP|XPU|MPS backend) out of memory|CUDA error: out of memory"
    r"|(?:CUBLAS|CUDNN)_STATUS_ALLOC_FAILED"
)


class OutOfMemory(EarlError, MemoryError):
    """A stage did not fit into memory.

    stage: the one whose layout has to change. doing: what it was at, a noun. bytes_asked: what the
    allocator refused, None where it did not say. advice: what to change, an imperative; details:
    more numbers. `payload` holds stage, bytes_asked and the details for whoever plans again.
    """

    expected = False

    def __init__(
        self, stage: str, doing: str, bytes_asked: int | None = None, advice: str = "",
        **details: Any,
    ) -> None:  # fmt: skip
        asked = "" if bytes_asked is None else f" when it asked for {bytes_asked:,} bytes more"
        super().__init__(
            f"{doing} ran out of memory{asked}",
            remedy=advice,
            payload={"stage": stage, "bytes_asked": bytes_asked, **details},
        )
        self.stage, self.doing = stage, doing

    def of(self, stage: str) -> OutOfMemory:
        """The same failure as one of another stage, which it was a part of."""
        details = {key: value for key, value in self.payload.items() if key != "stage"}
        asked = details.pop("bytes_asked")
        return OutOfMemory(stage, self.doing, asked, self.remedy, **details)


@contextmanager
def guarded(stage: str, doing: str, advice: str = "", **details: Any) -> Iterator[None]:
    """Raise `OutOfMemory` of this stage in place of what any allocator raises inside; one that is
    raised inside already becomes this stage's. details: more of its payload. Also a decorator of
    plain functions.
    """
    try:
        yield
    except OutOfMemory as error:
        if error.stage == stage:
            raise
        raise error.of(stage) from error
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(stage, doing, bytes_asked(str(error)), advice, **details) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator refused.

    Python raises a MemoryError, the system an OSError, and torch RuntimeErrors that only
    their texts tell apart.
    """
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, Exception) and refused(str(error))


def refused(text: str) -> bool:
    """Whether a message is one of an allocator that refused."""
    return bool(_REFUSALS.search(text))


def bytes_asked(text: str) -> int | None:
    """The bytes that a refusal names; None when it names none."""
    found = _ASKED.search(text)
    return int(float(found.group(1)) * _UNITS[found.group(2)]) if found else None
