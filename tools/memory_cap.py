"""A hard cap on the memory of a command and everything it starts: a control group of the kernel.

At the limit the kernel kills a process of the group. Version 1 and 2 of control groups, whichever
has the memory controller; both need root.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_SAMPLE_SECONDS = 0.1
_numbers = itertools.count()


class NoCap(RuntimeError):
    """No capped control group can be made here; the message says why."""


class MemoryCap:
    """A control group whose processes together may hold `limit_bytes`. A context manager.

    Start a command with what `entering` gives, and it runs inside, with all its children; every one
    must have ended when the context does. `peak_bytes` is the most that was held, file cache that
    the kernel may drop at any time left out, sampled ten times a second; a kill says that it was
    the limit. `kills` counts the kernel's. Raises `NoCap`.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        self.kills = 0
        self._directory, self._version = _make()
        try:
            self._write_limit()
        except OSError as error:
            remove_group(self._directory)
            raise NoCap(f"{self._directory} takes no memory limit: {error}") from error
        self._ended = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> MemoryCap:
        self._sampler.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._ended.set()
        self._sampler.join()
        self.kills = self._count_kills()
        remove_group(self._directory)

    def entering(self, command: Sequence[str]) -> list[str]:
        """The command, to be run so that it enters the group before it does anything."""
        enter = 'echo $$ > "$0" && exec "$@"'
        return ["sh", "-c", enter, str(self._directory / "cgroup.procs"), *command]

    def end_all(self) -> None:
        """Kill whatever still runs in the group; for runs that were given up."""
        for line in (self._directory / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(line), signal.SIGKILL)

    @property
    def version(self) -> int:
        """Version of control groups: 1 or 2."""
        return self._version

    def _write_limit(self) -> None:
        if self._version == 1:
            _write(self._directory / "memory.limit_in_bytes", self.limit_bytes)
            # The limit on memory and swap together; there only where swap is counted.
            with suppress(OSError):
                _write(self._directory / "memory.memsw.limit_in_bytes", self.limit_bytes)
        else:
            _write(self._directory / "memory.max", self.limit_bytes)
            with suppress(OSError):
                _write(self._directory / "memory.swap.max", 0)

    def _sample(self) -> None:
        while not self._ended.is_set():
            with suppress(OSError, ValueError):
                self.peak_bytes = max(self.peak_bytes, self._held())
            self._ended.wait(_SAMPLE_SECONDS)

    def _held(self) -> int:
        name = "memory.usage_in_bytes" if self._version == 1 else "memory.current"
        used = int((self._directory / name).read_text())
        lines = (self._directory / "memory.stat").read_text().splitlines()
        statistics = {key: int(value) for key, value in (line.split()[:2] for line in lines)}
        prefix = "total_" if self._version == 1 else ""
        cache = ("inactive_file", "active_file")
        return used - sum(statistics.get(prefix + name, 0) for name in cache)

    def _count_kills(self) -> int:
        name = "memory.oom_control" if self._version == 1 else "memory.events"
        with suppress(OSError):
            text = (self._directory / name).read_text()
            found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
            return int(found.group(1)) if found else 0
        return 0


def _make() -> tuple[Path, int]:
    """A fresh group below this process's own, and its version."""
    name = f"earl_no_limit_{os.getpid()}_{next(_numbers)}"
    problems = []
    for parent, version in _parents():
        try:
            (parent / name).mkdir()
        except OSError as error:
            problems.append(f"{parent}: {error.strerror}")
            continue
        if version == 1 or (parent / name / "memory.max").exists():
            return parent / name, version
        remove_group(parent / name)
        problems.append(f"{parent}: its groups have no memory controller")
    raise NoCap(
        "this benchmark needs a control group with the memory controller, and root to make it: "
        + ("; ".join(problems) or f"there is none at {_MOUNT}")
    )


def _parents() -> list[tuple[Path, int]]:
    """Places for a group: this process's own group, else the mount point; version 1 first."""
    found: list[tuple[Path, int]] = []
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    for line in sorted(lines, key=lambda line: line.startswith("0:")):
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            mounts, version = [_MOUNT / "memory"], 1
        elif controllers == "":
            mounts, version = [_MOUNT, _MOUNT / "unified"], 2
        else:
            continue
        for mount in mounts:
            # In a container the path may be the host's; the mount point is the own group then.
            found += [(place, version) for place in (mount / path.lstrip("/"), mount)]
    return [(place, version) for place, version in found if place.is_dir()]


def _write(path: Path, value: int) -> None:
    path.write_text(str(value))


def remove_group(directory: Path) -> None:
    """The kernel lets go of killed processes a moment after they are gone."""
    for _ in range(100):
        try:
            directory.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.1)
        else:
            return
