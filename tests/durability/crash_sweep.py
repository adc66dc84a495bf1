"""`python -m tests.durability.crash_sweep KIND=EVERY...`: lives with each I/O call failing.

For every call of a whole life: a process lives until that call and is killed there, or the call
fails; another process opens the run, finds all that was acknowledged and lives on. Its weights, the
metrics and the files left must be those of a life without a fault. One in EVERY calls fails. Prints
one line of JSON: what was found, by kind.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from earl_core.config import ConfigError
from earl_core.dispatch import ManifestError
from earl_core.run import RunDirectory, directory
from earl_core.run.record import RunDamaged
from earl_core.tensors.errors import CheckpointError
from tests.durability.io_calls import intercepted
from tests.durability.life import ITERATIONS, Life, life_config, live, open_run, weights_of
from tests.shared import MEMORY, memory_place

_DESCRIPTORS = frozenset({"open", "scandir", "listdir"})
_SPACE = frozenset(
    {"open", "write", "pwrite", "mkdir", "rename", "replace", "ftruncate", "posix_fallocate",
     "fsync"}
)  # fmt: skip

KINDS: dict[str, frozenset[str] | None] = {
    "kill": None,
    "EIO": None,
    "ENOSPC": _SPACE,
    "EMFILE": _DESCRIPTORS,
    "short": frozenset({"write", "pwrite"}),
}
"""What may happen at a call, and to which calls it can happen; None: to all."""

EXPECTED = (OSError, ManifestError, ConfigError, RunDamaged, CheckpointError)
"""Errors that a failing call may end a life with; anything else is a bug."""

_SECONDS = 120.0
_LEFTOVER = re.compile(r"\..*(tmp|building|retired|removed)")


class SweepFailed(AssertionError):
    """A life that did not go on as it should have."""


def main(wanted: dict[str, int]) -> None:
    """Sweep kinds of faults, one in so many calls, in a directory of its own in shared memory."""
    scratch = Path(tempfile.mkdtemp(prefix=memory_place("sweep-").name, dir=MEMORY))
    try:
        warm(scratch)
        life = _undisturbed(scratch)
        print(
            json.dumps({kind: sweep(kind, every, scratch, *life) for kind, every in wanted.items()})
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def sweep(kind: str, every: int, scratch: Path, calls: list[str], expected: str) -> dict[str, Any]:
    """Fail one in `every` calls; how many there were and how the lives ended.

    calls, expected: names of an undisturbed life's calls, and the weights that it ends with.
    """
    started, ends = time.monotonic(), dict[str, int]()
    which = KINDS[kind]
    numbers = [number for number, name in enumerate(calls) if which is None or name in which]
    for number in numbers[::every]:
        end, name = _one(kind, number, scratch, expected)
        ends[end] = ends.get(end, 0) + 1
        if name != calls[number]:
            raise SweepFailed(f"call {number} was {name!r}, not {calls[number]!r}: lives differ")
    seconds = round(time.monotonic() - started, 1)
    failed = sum(ends.values())
    return {"calls": len(calls), "failed": failed, "ends": ends, "seconds": seconds}


def import_ahead() -> None:
    """Have here, once, what every child would import anew."""
    with suppress(ImportError):
        import pandas  # noqa: F401  (pyarrow takes it at its first use)


def warm(scratch: Path) -> None:
    """Have here, once, what every child would do anew."""
    import_ahead()
    text = directory.dump_config(life_config(scratch))
    directory.dump_config = lambda config: text  # type: ignore[assignment]


def _undisturbed(scratch: Path) -> tuple[list[str], str]:
    """Names of a life's calls, in order, and the weights that it ends with."""
    made = []

    def count(name: str, real: Callable[..., Any], given: tuple[Any, ...], more: Any) -> Any:
        made.append(name)
        return real(*given, **more)

    def work() -> str:
        with intercepted(count):
            weights = live(life_config(scratch))
        return json.dumps([made, weights])

    calls, weights = json.loads(in_child(work))
    shutil.rmtree(scratch / "runs")
    return calls, weights


def _one(kind: str, number: int, scratch: Path, expected: str) -> tuple[str, str]:
    """A life whose call `number` fails, and what comes after it; how it ended and at what call."""
    log = scratch / "acknowledged"
    log.touch()
    end = in_child(lambda: _faulty_life(kind, number, scratch, log))
    lines = [line.split() for line in log.read_text().splitlines()]
    name, *where = next((line[1:] for line in lines if line[0] == "fault"), [""])
    try:
        found = in_child(lambda: life_after(scratch, lines))
        if found != expected:
            raise SweepFailed(f"ended with the weights {found!r} instead of {expected!r}")
    except SweepFailed as failure:
        raise SweepFailed(f"{kind} at call {number}, {name} {where}: {failure}") from None
    for path in scratch.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return end or "killed", name


def _faulty_life(kind: str, wanted: int, scratch: Path, log: Path) -> str:
    made = 0
    told = os.open(log, os.O_WRONLY | os.O_APPEND)
    write = os.write

    def fail(name: str, real: Callable[..., Any], given: tuple[Any, ...], more: Any) -> Any:
        nonlocal made
        made += 1
        if made - 1 != wanted:
            return real(*given, **more)
        write(told, f"fault {name} {given[0] if given else ''}\n".encode())
        if name in ("write", "pwrite") and kind in ("kill", "short"):
            # Half of it arrives: a torn line, or a write that stops short and says so.
            done = real(given[0], bytes(given[1])[: max(1, len(given[1]) // 2)], *given[2:])
            if kind == "short":
                return done
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(getattr(errno, kind), os.strerror(getattr(errno, kind)))

    with intercepted(fail):
        try:
            live(life_config(scratch), lambda what: void(write(told, f"{what}\n".encode())))
        except EXPECTED as error:
            return type(error).__name__
    return "whole"


def void(value: object) -> None:
    """Drop a result."""


def life_after(scratch: Path, lines: list[list[str]]) -> str:
    """Find what was acknowledged, live on; the weights at the end."""
    run = open_run(life_config(scratch))
    try:
        _check_kept(run, lines)
        Life(run).go_on()
        weights = weights_of(run, ITERATIONS - 1)
        numbers = [line["iteration"] for line in run.metrics()]
        _require(numbers == list(range(ITERATIONS)), f"metrics of {numbers}")
        run.prune_checkpoints()
        run.finish()
    finally:
        run.close()
    left = [path.name for path in (run.path / "checkpoints").iterdir()]
    _require(left == [f"{ITERATIONS - 1:06d}"], f"checkpoints {left}")
    strange = [str(path) for path in run.path.rglob("*") if _LEFTOVER.fullmatch(path.name)]
    _require(not strange, f"left over: {strange}")
    held = [str(path) for path in (scratch / "shm").rglob("*") if path.is_file()]
    _require(not held, f"left in shared memory: {held}")
    return weights


def _check_kept(run: RunDirectory, lines: list[list[str]]) -> None:
    stable, measured = run.stable_iterations(), {line["iteration"] for line in run.metrics()}
    _require(set(stable) <= measured, f"STABLE are {stable}, measured only {measured}")
    for what, *rest in lines:
        if what == "stable":
            _require(run.last_stable() >= int(rest[0]), f"iteration {rest[0]} is not STABLE")
        elif what == "metrics":
            _require(int(rest[0]) in measured, f"the metrics of iteration {rest[0]} are lost")
        elif what == "sealed" and int(rest[0]) > run.last_stable():
            number, stage, key, digest = rest
            found = run.sealed(int(number), stage, key)
            _require(found is not None and found.digest == digest, f"{stage} {number} is lost")


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise SweepFailed(text)


def in_child(work: Callable[[], str], seconds: float = _SECONDS) -> str:
    """What `work` returns in a forked process; empty when it was killed.

    Raises `SweepFailed` when it raises or takes too long.
    """
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(out)
        text = "!" + "the process ended early"
        try:
            text = "=" + work()
        except BaseException:
            text = "!" + traceback.format_exc()
        finally:
            with suppress(OSError):
                os.write(into, text.encode()[:60000])
            os._exit(0)
    os.close(into)
    answer = _answer(child, out, seconds)
    if answer.startswith("!"):
        raise SweepFailed(answer[1:])
    return answer[1:]


def _answer(child: int, out: int, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(out)
            return f"!hung for {seconds:.0f} s"
        time.sleep(0.002)
    with os.fdopen(out, "rb") as stream:
        return stream.read().decode()


if __name__ == "__main__":
    pairs = (argument.partition("=") for argument in sys.argv[1:])
    main({kind: int(every or 1) for kind, _, every in pairs})
