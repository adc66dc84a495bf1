"""Memory: limits and use of this process's control groups, sizes of processes, running out of it.

`root` is where the file systems `proc` and `sys` are. Sizes of processes are read from /proc:
psutil has no peaks, and its import would be a third of a rank's start. Running out of memory is one
typed error for controllers, engines and learners, however their allocators say it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from earl_core.system.control_groups import own_groups
from earl_core.system.errors import EarlError

_LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}
_USAGE = {1: "memory.usage_in_bytes", 2: "memory.current"}
_HOST_COUNTER = "/proc/vmstat"


class _Limited(NamedTuple):
    """A group with a limit, in bytes."""

    version: int
    directory: Path
    limit: int


def memory_limit(root: Path = Path("/")) -> int:
    """Bytes that this process and all that share its limits may use: the least of the machine's and
    of the limits of all groups around it."""
    return min([_physical(), *(group.limit for group in _limited(root))])


def memory_in_use(root: Path = Path("/")) -> int:
    """Bytes of `memory_limit` that are in use now, page cache that can be dropped left out."""
    # A rank reads kills alone, and psutil's import would be a third of its start.
    import psutil

    tightest = min(_limited(root), key=lambda group: group.limit, default=None)
    if tightest is None or tightest.limit >= _physical():
        memory = psutil.virtual_memory()
        return int(memory.total - memory.available)
    used = _number(tightest.directory / _USAGE[tightest.version]) or 0
    return max(0, used - _droppable(tightest))


def out_of_memory_counters() -> dict[str, int]:
    """The kernel's counts of out-of-memory kills, as far as they can be seen from here.

    The keys are files: those of this process's group, whose children's kills they count and nobody
    else's; without one the host's counter, which has everybody's.
    """
    files: list[Path] = []
    for version, _, own in own_groups(Path("/"), "memory"):
        if version == 2:
            files.append(own / "memory.events")
        else:
            # Version 1 counts a kill in the victim's group alone, not in those above it.
            files += [own / "memory.oom_control", *own.glob("*/memory.oom_control")]
    known = {str(file): count for file in files if (count := _kills(file)) is not None}
    return known or {_HOST_COUNTER: _kills(Path(_HOST_COUNTER)) or 0}


def out_of_memory_kills_since(before: dict[str, int]) -> int:
    """Count the processes that were killed for memory since `before` was read. Others than ours may
    be among them, so this is a hint, not a proof."""
    now = out_of_memory_counters()
    return max((now[path] - before[path] for path in now.keys() & before.keys()), default=0)


def _limited(root: Path) -> list[_Limited]:
    """The process's groups and their ancestors, as far as they have a limit."""
    found = []
    for group in own_groups(root, "memory"):
        for directory in group.up():
            limit = _number(directory / _LIMIT[group.version])
            if limit is not None:
                found.append(_Limited(group.version, directory, limit))
    return found


def _physical() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _number(path: Path) -> int | None:
    """The file's number; None for `max`, or where there is no such file."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _droppable(group: _Limited) -> int:
    """Bytes of files that the kernel may drop; shared memory is none of them."""
    try:
        lines = (group.directory / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    stat = {name: int(value) for name, _, value in (line.partition(" ") for line in lines)}
    prefix = "total_" if group.version == 1 else ""
    return sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))


def _kills(path: Path) -> int | None:
    """The file's count of kills; None when there is none."""
    try:
        match = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match.group(1)) if match else None


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
    """Raise `OutOfMemory` of this stage in place of what any allocator raises inside; one raised
    inside becomes this stage's. details: more of its payload. Also a decorator of plain functions.
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
    """Tell whether the error is an allocator's refusal. Python raises a MemoryError, the system an
    OSError, and torch RuntimeErrors that only their texts tell apart."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, Exception) and refused(str(error))


def refused(text: str) -> bool:
    """Tell whether a message is one of an allocator that refused."""
    return bool(_REFUSALS.search(text))


def bytes_asked(text: str) -> int | None:
    """The bytes that a refusal names; None when it names none."""
    found = _ASKED.search(text)
    return int(float(found.group(1)) * _UNITS[found.group(2)]) if found else None


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


_FIELD = re.compile(r"^(VmHWM|RssFile|RssShmem):\s+(\d+) kB", re.MULTILINE)


def resident_bytes(pid: int) -> tuple[int, int]:
    """A process's resident bytes: all, and the private part; (0, 0) if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0, 0
    resident, shared = int(fields[1]), int(fields[2])
    return resident * _PAGE_BYTES, (resident - shared) * _PAGE_BYTES


def tree_private_bytes(pid: int) -> int:
    """The private resident bytes of a process and its living descendants.

    Walks `/proc/<pid>/task/*/children`, which costs microseconds where a look at every process of
    the host costs milliseconds.
    """
    total = resident_bytes(pid)[1]
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                    total += tree_private_bytes(int(child))
    return total


def private_peak_bytes(pids: Iterable[int]) -> int:
    """Peaks of their private memory (neither file nor shared memory) since these were reset, added
    up; processes that are gone count nothing."""
    found = map(_sizes, pids)
    shared = ("RssFile", "RssShmem")
    return sum(max(0, each.get("VmHWM", 0) - sum(map(each.get, shared, (0, 0)))) for each in found)


def resident_peak_bytes(pids: Iterable[int]) -> int:
    """Likewise of all their resident memory."""
    return sum(_sizes(pid).get("VmHWM", 0) for pid in pids)


def reset_peaks(pids: Iterable[int]) -> None:
    """Start a new measurement of both; without the right to, a peak stays that of the whole life,
    an upper bound, which is the safe side for a memory model."""
    for pid in pids:
        with suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def _sizes(pid: int) -> dict[str, int]:
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        return {name: int(size) * 1024 for name, size in _FIELD.findall(status)}
    return {}


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""


def keep_freed_memory() -> None:
    """Have the C library keep freed blocks below 32 MiB, and not only for the next microbatch.

    Taken from the host anew, every page is a fault: a third of an update's processor time in a
    virtual machine whose host takes free pages back. See `give_back_free_memory`.
    """
    # Only glibc has it.
    with suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 2**25)
        mallopt(_M_TRIM_THRESHOLD, -1)


_MADV_DONTNEED = 4


def give_back_pages(start: int, size: int) -> int:
    """Give the host the whole pages of `size` bytes from address `start`, private memory that stays
    allocated and reads zeros from now on; the bytes given back."""
    first = -(-start // _PAGE_BYTES) * _PAGE_BYTES
    length = (start + size) // _PAGE_BYTES * _PAGE_BYTES - first
    if length <= 0:
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    if madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise failed")
    return length


def give_back_free_memory() -> None:
    """Return what the C library's allocator holds but nobody uses.

    It keeps freed blocks below 32 MiB for later, gigabytes after a large microbatch, which on a CPU
    other stages cannot have meanwhile. Taking them again costs about a second for 2 GiB.
    """
    # Only glibc has it.
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
