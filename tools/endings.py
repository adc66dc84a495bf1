"""End everything that a benchmark or an instrument starts with it, in whatever way it ends.

A process beside the benchmark waits until the benchmark is gone: a pipe closes, also after SIGKILL.
Then it ends what is left of the benchmark's descendants: those it has seen, and those that carry
the benchmark's mark in their environment. SIGTERM, which is what `timeout` sends, leaves the
benchmark's blocks first, as Ctrl-C does, so that its scratch files go too.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import uuid
from types import FrameType

from earl_core.system.processes import (
    Process,
    child_path,
    descendants,
    end_processes,
    inspect,
    marked,
    still,
)

_MARK = "EARL_BENCHMARK"
_LOOK_SECONDS = 1.0
_GRACE_SECONDS = 20.0
"""Seconds for a training to end its engine."""

_kept: list[int] = []
"""Our end of the pipe, which no child inherits and nobody closes."""


def end_with_us() -> None:
    """Have all that this process starts from now on end with it; harmless when called again. A
    benchmark that another one started is the other's. Call it from the main thread."""
    if _MARK in os.environ:
        return
    os.environ[_MARK] = mark = uuid.uuid4().hex
    signal.signal(signal.SIGTERM, _leave)
    read, write = os.pipe()
    _kept.append(write)
    unmarked = {name: value for name, value in os.environ.items() if name != _MARK}
    subprocess.Popen(
        [sys.executable, "-P", "-m", "tools.endings", str(read), str(os.getpid()), mark],
        pass_fds=(read,),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
        env={**unmarked, "PYTHONPATH": child_path(os.environ)},
    )
    os.close(read)


def of_benchmark() -> bool:
    """Tell whether Python was started with a benchmark or an instrument."""
    module = sys.modules["__main__"].__spec__
    return module is not None and module.name.startswith(("benchmarks.", "tools."))


def _leave(number: int, frame: FrameType | None) -> None:
    # A second one finds nobody who would clean up any more.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.exit(128 + number)


def main(pipe: int, benchmark: int, mark: str) -> None:
    """Wait for the benchmark's end, and end what it leaves."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    seen: dict[tuple[int, int], Process] = {}
    own = os.getpid()
    while not select.select([pipe], [], [], _LOOK_SECONDS)[0]:
        if inspect(benchmark) is None:
            break
        seen = {
            (each.pid, each.start_ticks): each
            for each in [*descendants(benchmark), *filter(still, seen.values())]
        }

    def left() -> list[Process]:
        roots = [now for each in seen.values() if (now := still(each)) is not None]
        found = [*roots, *marked(mark, _MARK)]
        below = [child for each in found for child in descendants(each.pid)]
        return [each for each in {*found, *below} if each.pid != own]

    end_processes(left, _GRACE_SECONDS)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
