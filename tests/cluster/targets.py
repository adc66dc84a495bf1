"""Targets that the cluster tests run in workers; they start quickly and import nothing heavy."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from earl_core.cluster.rank_process import WorkerContext

SLEEPER = "import time\nwhile True: time.sleep(1)"
STUBBORN = (
    "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    f"print('stubborn', flush=True)\n{SLEEPER}"
)


class OutOfRoomError(RuntimeError):
    """Carries a payload, as the learner's typed errors do."""

    def __init__(self, message: str, payload: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.payload = dict(payload)


class Target:
    """Does a little of everything that stages do, and everything that goes wrong with them."""

    opened: ClassVar[int] = 0

    def __init__(
        self, context: WorkerContext, deployment: dict[str, Any], **arguments: Any
    ) -> None:
        self.context = context
        self.deployment = deployment
        self.arguments = arguments
        self.calls = 0
        self.ticks = 0
        self.ticker: asyncio.Task[None] | None = None
        self.children: list[subprocess.Popen[bytes]] = []
        if "fail_with" in arguments:
            raise OutOfRoomError(arguments["fail_with"], {"needed_bytes": 123})
        if "hang_seconds" in arguments:
            time.sleep(arguments["hang_seconds"])
        print("target is built")

    def close(self) -> None:
        if path := self.arguments.get("closed_path"):
            Path(path).write_text(f"rank {self.context.rank} closed")

    def describe(self) -> dict[str, Any]:
        self.calls += 1
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        names = (*names, "MASTER_PORT", "EXTRA")
        return {
            "pid": os.getpid(),
            "rank": self.context.rank,
            "world_size": self.context.world_size,
            "role": self.context.role,
            "stage": self.context.stage,
            "iteration": self.context.iteration,
            "deployment": self.deployment,
            "arguments": self.arguments,
            "calls": self.calls,
            "thread": threading.current_thread() is threading.main_thread(),
            "environment": {name: os.environ.get(name) for name in names},
            "log_path": str(self.context.log_path),
            "torch": "torch" in sys.modules,
        }

    def reshard(self, deployment: dict[str, Any]) -> dict[str, Any]:
        if self.context.rank == deployment.get("fails_on"):
            raise ValueError(f"rank {self.context.rank} cannot be laid out so")
        self.calls += 1
        self.deployment = deployment
        return {"rank": self.context.rank}

    def echo(self, value: Any) -> Any:
        return value

    def blob(self, size: int) -> str:
        return "x" * size

    def unsendable(self) -> Any:
        return object()

    def log_and_print(self, lines: int) -> None:
        for line in range(lines):
            print(f"printed line {line}")
        logging.getLogger("target").warning("a warning")

    def fail(self, message: str, payload: dict[str, Any] | None = None) -> None:
        raise ValueError(message) if payload is None else OutOfRoomError(message, payload)

    def fail_on(self, rank: int, others_seconds: float) -> int:
        if self.context.rank == rank:
            raise ValueError(f"rank {rank} cannot go on")
        time.sleep(others_seconds)
        return self.context.rank

    def count(self, to: int, pause: float = 0.0) -> int:
        for done in range(1, to + 1):
            self.context.report({"done": done})
            time.sleep(pause)
        return to

    def ask(self, path: str) -> str:
        """Report, and wait for what whoever hears of it writes."""
        self.context.report({"asks": True})
        while not Path(path).exists():
            time.sleep(0.01)
        return Path(path).read_text()

    def until_cancelled(self, give_up_after: float) -> str:
        self.context.report({"begun": True})
        return "cancelled" if self.context.cancelled.wait(give_up_after) else "ran out"

    def sleep(self, seconds: float) -> None:
        self.context.report({"begun": True})
        self._hang_here(seconds)

    def _hang_here(self, seconds: float) -> None:
        time.sleep(seconds)

    def private(self) -> None: ...

    _private = private

    def leave(self, code: int) -> None:
        print("leaving now")
        sys.stdout.flush()
        os._exit(code)

    def quit(self, code: int) -> None:
        sys.exit(code)

    def kill_self(self, number: int) -> None:
        print("about to be killed")
        os.kill(os.getpid(), number)
        time.sleep(30)

    def spawn(self, kind: str) -> int:
        """Start a process that sleeps for ever; return its pid."""
        if kind == "child":
            child = subprocess.Popen([sys.executable, "-S", "-c", SLEEPER])
        elif kind == "stubborn":
            child = subprocess.Popen([sys.executable, "-S", "-c", STUBBORN])
        elif kind == "orphan":
            # Its parent is gone and it has a session of its own, as a daemon has.
            script = (
                "import subprocess, sys; print(subprocess.Popen([sys.executable, '-S', '-c', "
                f"{SLEEPER!r}], start_new_session=True, stdout=subprocess.DEVNULL).pid)"
            )
            return int(subprocess.check_output([sys.executable, "-S", "-c", script]))
        else:
            pid = os.fork()
            if pid == 0:
                while True:
                    time.sleep(1)
            return pid
        self.children.append(child)
        return child.pid

    def allocate(self, megabytes: int, seconds: float = 0.0) -> int:
        block = bytearray(megabytes << 20)
        for position in range(0, len(block), 4096):
            block[position] = 1
        time.sleep(seconds)
        return len(block)

    def allocate_in_cgroup(self, cgroup: str, megabytes: int) -> int:
        Path(cgroup, "cgroup.procs").write_text(str(os.getpid()))
        return self.allocate(megabytes)

    async def start_ticking(self) -> None:
        async def tick() -> None:
            while True:
                self.ticks += 1
                await asyncio.sleep(0.01)

        self.ticker = asyncio.create_task(tick())

    async def ticks_now(self) -> int:
        await asyncio.sleep(0)
        return self.ticks

    async def loop_id(self) -> int:
        return id(asyncio.get_running_loop())

    def own_loop(self) -> int:
        async def answer() -> int:
            return 42

        return asyncio.run(answer())

    def stop_heartbeat(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(30)


class AsyncClose:
    """Has an `async def close` that needs the loop to turn."""

    def __init__(self, context: WorkerContext, deployment: dict[str, Any], path: str) -> None:
        self.path = Path(path)

    async def close(self) -> None:
        await asyncio.sleep(0.01)
        self.path.write_text("closed")


class SlowClose:
    """Never returns from `close()`."""

    def __init__(self, context: WorkerContext, deployment: dict[str, Any]) -> None: ...

    def close(self) -> None:
        time.sleep(600)
