"""A command in a process group of its own: its output, its peak memory, its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tools.harness import REPOSITORY

TIMEOUT_SECONDS = 3600.0
"""Most seconds of a training that is measured."""

_SAMPLE_SECONDS = 2.0
"""Reading the page tables of 10 GiB takes 0.1 s, in which those processes wait for their locks."""
_STOP_SECONDS = 30.0
_SHOWN_CHARACTERS = 300


class CommandFailed(RuntimeError):
    """A benchmarked command ended with an error; the message holds the end of its log."""

    @property
    def reason(self) -> str:
        """The line that says most: the last error of the log."""
        lines = [line.strip() for line in str(self).splitlines() if line.strip()]
        named = [line for line in lines if "Error" in line] or lines
        return (named or ["killed, without a message"])[-1][:_SHOWN_CHARACTERS]


class MeasuredCommand:
    """Runs a command and samples the memory of all its processes every two seconds.

    The memory is the sum of proportional set sizes, so that pages which processes share (shared
    memory included) count once. Use it as a context manager: leaving it ends whatever still runs.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        directory: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.command = list(command)
        self.log = log
        self.peak_bytes = 0
        self._seen: dict[int, psutil.Process] = {}
        self._ended = threading.Event()
        self._stream = log.open("wb")
        self.process = subprocess.Popen(
            self.command,
            stdout=self._stream,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=directory,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    def __enter__(self) -> MeasuredCommand:
        return self

    def __exit__(self, *unused: object) -> None:
        self.stop()

    def wait(self, timeout_seconds: float) -> None:
        """Wait for the end. Raises `CommandFailed` for an error or when the time is up."""
        try:
            code = self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.stop()
            raise CommandFailed(
                f"{' '.join(self.command)} did not end within {timeout_seconds:.0f} s.\n"
                f"{self.tail()}"
            ) from None
        if code:
            raise CommandFailed(
                f"{' '.join(self.command)} ended with exit code {code}.\n{self.tail()}"
            )

    def stop(self) -> None:
        """Interrupt the command, then use force on what is left of it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_STOP_SECONDS)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._ended.set()
        self._sampler.join()
        left = [process for process in self._seen.values() if process.is_running()]
        for process in left:
            with suppress(psutil.Error):
                process.terminate()
        for process in psutil.wait_procs(left, timeout=10.0)[1]:
            with suppress(psutil.Error):
                process.kill()
        self._stream.close()

    def tail(self, lines: int = 25) -> str:
        """The end of the command's output."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def _sample(self) -> None:
        while not self._ended.is_set() and self.process.poll() is None:
            started = time.perf_counter()
            self.peak_bytes = max(self.peak_bytes, self._now())
            taken = time.perf_counter() - started
            # Reading a large process's page tables costs time: never more than a tenth of it.
            self._ended.wait(max(_SAMPLE_SECONDS, 9 * taken))

    def _now(self) -> int:
        with suppress(psutil.Error):
            root = psutil.Process(self.process.pid)
            self._seen[root.pid] = root
            self._seen.update({child.pid: child for child in root.children(recursive=True)})
        return sum(proportional_bytes(pid) for pid in list(self._seen))


def train_command(config: object, settings: Iterable[object], *options: str) -> list[str]:
    """`earl train` of a run file or recipe with these overrides."""
    sets = (word for each in settings for word in ("--set", str(each)))
    return [sys.executable, "-m", "flows.cli", "train", str(config), *options, *sets]


def train(
    config: object,
    settings: Iterable[object],
    scratch: Path,
    *options: str,
    log: str = "train.log",
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run `earl train` to its end, with a Prefect in `scratch` as no other may be under test; the
    most bytes that all its processes held. Raises `CommandFailed`."""
    with MeasuredCommand(
        train_command(config, settings, "--plain", *options),
        scratch / log,
        directory=REPOSITORY,
        environment={"PREFECT_HOME": str(scratch / "prefect"), **(environment or {})},
    ) as trained:
        trained.wait(TIMEOUT_SECONDS)
    return trained.peak_bytes


def proportional_bytes(pid: int) -> int:
    """The proportional set size of a process; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0
