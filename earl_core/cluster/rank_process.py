"""The process of each rank: it builds the target and answers calls until the controller is done.

The main thread runs one call at a time, and one asyncio loop that lives as long as the rank: it
turns while the rank waits and while an `async def` method runs, so an engine's background tasks go
on between calls; plain methods run outside it. A reader thread receives, a heartbeat thread says
that the process lives, a lifeline thread ends everything when the supervisor is gone. The target
knows its rank by a `WorkerContext`. Forked by the supervisor.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO, cast

from earl_core.cluster.errors import Raised
from earl_core.secrets import guard_output
from earl_core.system.frames import Channel, WireError
from earl_core.system.import_path import load_object
from earl_core.system.memory import (
    out_of_memory_counters,
    out_of_memory_kills_since,
    resident_bytes,
    tree_private_bytes,
)
from earl_core.system.processes import (
    ENDING_GRACE_SECONDS,
    descendants,
    end_processes,
    marked,
    prefer_as_oom_victim,
)

_MEMORY_SECONDS = 0.25

logger = logging.getLogger(__name__)


class MemoryMeter:
    """The peak of the tree's private memory since the last `reset`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._peak = 0

    def reset(self) -> None:
        with self._lock:
            self._peak = 0

    def read(self) -> dict[str, int]:
        pid = os.getpid()
        tree = tree_private_bytes(pid)
        with self._lock:
            self._peak = max(self._peak, tree)
            peak = self._peak
        rss = resident_bytes(pid)[0]
        return {"rss_bytes": rss, "tree_bytes": tree, "tree_peak_bytes": peak}


class Rank:
    """One rank's end of the wire, its target and its loop."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._inbox: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._lock = threading.Lock()
        self._call_id: int | None = None
        self._given_up: set[int] = set()
        self._memory = MemoryMeter()
        self._memory_kills = out_of_memory_counters()
        self._context: WorkerContext | None = None
        self._target: Any = None

    def run(self) -> bool:
        """Answer messages; True when told to close, False when the controller is gone."""
        threading.Thread(target=self._read, name="earl-reader", daemon=True).start()
        while (message := self._loop.run_until_complete(self._inbox.get())) is not None:
            if message["kind"] == "start":
                self._start(message)
            elif message["kind"] == "call":
                self._call(message)
            else:
                self._close()
                return True
        return False

    def _read(self) -> None:
        try:
            for message in self._channel.messages():
                if message["kind"] == "cancel":
                    self._give_up(int(message["id"]))
                else:
                    self._put(message)
        except WireError:
            logger.exception("The controller sent nonsense; this rank cannot go on.")
            os._exit(1)
        self._put(None)

    def _put(self, message: dict[str, Any] | None) -> None:
        # The loop is closed once the rank was told to close; nothing that comes later matters.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._inbox.put_nowait, message)

    def _give_up(self, call_id: int) -> None:
        with self._lock:
            self._given_up.add(call_id)
            if call_id == self._call_id and self._context is not None:
                self._context.cancelled.set()

    def _start(self, message: dict[str, Any]) -> None:
        for entry in message["sys_path"]:
            if entry not in sys.path:
                sys.path.append(entry)
        beat = threading.Thread(
            target=self._heartbeat,
            args=(message["heartbeat_seconds"],),
            name="earl-heartbeat",
            daemon=True,
        )
        beat.start()
        self._context = context = WorkerContext(
            rank=message["rank"],
            world_size=len(message["hosts"]),
            hosts=tuple(message["hosts"]),
            role=message["role"],
            log_path=Path(message["log_path"]),
            _send_progress=self._progress,
        )

        def build() -> None:
            target = load_object(message["target"])
            self._target = target(context, message["deployment"], **message["arguments"])

        self._answer(message["id"], build)

    def _call(self, message: dict[str, Any]) -> None:
        context = cast(WorkerContext, self._context)
        call_id = int(message["id"])
        context.stage, context.iteration = message["stage"], message["iteration"]
        with self._lock:
            self._call_id = call_id
            context.cancelled.clear()
            if call_id in self._given_up:
                context.cancelled.set()

        def invoke() -> Any:
            return self._finish(getattr(self._target, message["method"])(**message["arguments"]))

        try:
            self._answer(call_id, invoke)
        finally:
            with self._lock:
                self._call_id = None
                self._given_up.clear()

    def _finish(self, value: Any) -> Any:
        if not inspect.isawaitable(value):
            return value

        async def wait() -> Any:
            return await value

        return self._loop.run_until_complete(wait())

    def _answer(self, call_id: int, function: Callable[[], Any]) -> None:
        self._memory.reset()
        try:
            value = function()
            reply = {"kind": "result", "id": call_id, "value": value, "memory": self._memory.read()}
            self._send(reply)
        except Exception as error:
            logger.exception("call %s failed", call_id)
            raised = Raised.of(error, out_of_memory_kills_since(self._memory_kills))
            reply = {"kind": "failed", "id": call_id, "raised": asdict(raised)}
            self._send({**reply, "memory": self._memory.read()})

    def _progress(self, payload: dict[str, Any]) -> None:
        call_id = self._call_id
        if call_id is not None:
            self._send({"kind": "progress", "id": call_id, "payload": payload})

    def _heartbeat(self, seconds: float) -> None:
        due = 0.0
        while True:
            memory = self._memory.read()
            if time.monotonic() >= due:
                due = time.monotonic() + seconds
                self._send({"kind": "heartbeat", "memory": memory})
            time.sleep(min(seconds, _MEMORY_SECONDS))

    def _send(self, message: dict[str, Any]) -> None:
        # The supervisor acts when the controller is gone; a send that fails needs no second voice.
        with suppress(OSError):
            self._channel.send(message)

    def _close(self) -> None:
        close = getattr(self._target, "close", None)
        if callable(close):
            self._finish(close())
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


def _watch_lifeline(fd: int, mark: str) -> None:
    """Block until the supervisor is gone, then end this rank and all that it started."""
    while os.read(fd, 1):
        pass
    logger.error("The supervisor of this rank is gone; ending the rank and its children.")
    own = os.getpid()
    # Without a supervisor orphans go to init, where only the mark in their environment tells them.
    end_processes(
        lambda: {p for p in (*descendants(own), *marked(mark)) if p.pid != own},
        ENDING_GRACE_SECONDS,
    )
    os._exit(1)


def _use_threads() -> None:
    """The OpenMP runtime of a forked rank was loaded before its environment was set."""
    threads, torch = os.environ.get("OMP_NUM_THREADS", ""), sys.modules.get("torch")
    if threads.isdigit() and torch is not None:
        torch.set_num_threads(int(threads))


def main(channel_fd: int, lifeline_fd: int, mark: str) -> None:
    """Be a rank until the controller is done with it, or the supervisor is gone."""
    _use_threads()
    for stream in (sys.stdout, sys.stderr):
        cast(Any, stream).reconfigure(line_buffering=True, errors="backslashreplace")
    guard_output()
    faulthandler.enable(file=cast(TextIO, sys.__stderr__))
    faulthandler.register(signal.SIGUSR1, file=cast(TextIO, sys.__stderr__), all_threads=True)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    prefer_as_oom_victim()
    lifeline = threading.Thread(
        target=_watch_lifeline, args=(lifeline_fd, mark), name="earl-lifeline", daemon=True
    )
    lifeline.start()
    if not Rank(Channel(socket.socket(fileno=channel_fd))).run():
        # The supervisor is about to end this tree. Should it be gone as well, the lifeline thread
        # does, which must not be cut short by leaving here.
        lifeline.join()


@dataclass
class WorkerContext:
    """Handed to the target's constructor.

    `hosts` names the host of each rank, as manifests do; empty: all are on this one. `here`: the
    target is in the controller's own process, for a debugger (`InProcessGroup`). `stage` and
    `iteration` are those of the current call. `cancelled` is set when the caller gave the current
    call up: a method that checks it and returns keeps the group; one that runs on for longer than
    the controller waits costs it.
    """

    rank: int
    world_size: int
    role: str
    log_path: Path
    hosts: tuple[str, ...] = ()
    here: bool = False
    cancelled: threading.Event = field(default_factory=threading.Event)
    stage: str = ""
    iteration: int | None = None
    _send_progress: Callable[[dict[str, Any]], None] = lambda _: None

    def report(self, progress: dict[str, Any]) -> None:
        """Send a small JSON dictionary to the caller's `on_progress`; a few a second is plenty.

        Any thread may call this. Outside a call, or when the controller is gone, it does nothing.
        Raises `WireError` if the dictionary is not JSON.
        """
        self._send_progress(progress)
