"""A worker group of one rank in the controller's own process and the caller's thread: a debugger
then stops where the work is done.

A deadline, an abort and the death of a rank mean nothing here: whoever debugs may take any time.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import threading
from bdb import BdbQuit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from earl_core.cluster.errors import Raised, Where, WorkerCallFailed, WorkerLost
from earl_core.cluster.host import Host, MemoryUse
from earl_core.cluster.rank_process import WorkerContext
from earl_core.cluster.rpc import Json, Progress
from earl_core.system.frames import FrameBuffer, encode
from earl_core.system.import_path import load_object

_building = threading.Lock()
"""One target at a time: modules that threads import side by side may be seen half made."""


class InProcessGroup:
    """A `Group` of one rank in this process. Its event loop turns during calls only, and the
    environment of the process is left alone but for the number of threads that torch takes."""

    def __init__(
        self,
        role: str,
        target: str,
        *,
        log_directory: Path,
        environment: Mapping[str, str] | None = None,
        **_: Any,
    ) -> None:
        self.role = role
        self._target_name = target
        self._log = Path(log_directory) / f"{role}-0.log"
        self._threads = int((environment or {}).get("OMP_NUM_THREADS", "0"))
        self._turn = threading.RLock()
        self._deployment: Json | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._target: Any = None
        self._context: WorkerContext | None = None

    @property
    def alive(self) -> bool:
        """True while the target is built, as `Group` wants."""
        return self._deployment is not None

    @property
    def deployment(self) -> Json | None:
        """Deployment that the target was built for; None while the group is not alive."""
        return self._deployment

    @property
    def pids(self) -> list[int]:
        """This process while the group is alive, as `WorkerGroup` lists its ranks."""
        return [os.getpid()] if self.alive else []

    @property
    def silent_loss(self) -> str:
        """Always empty, because nothing is lost between the calls of one process."""
        return ""

    @property
    def memory(self) -> list[MemoryUse]:
        """One entry without numbers, because the process is that of all roles."""
        return [MemoryUse()]

    def start(
        self,
        deployment: Json,
        arguments: Json,
        world_size: int = 1,
        hosts: Sequence[Host] | None = None,
    ) -> None:
        """Build the target in this process, as `Group` starts its ranks. Raises `ValueError` for
        several ranks: they need processes."""
        if world_size != 1:
            raise ValueError(f"{world_size} ranks of {self.role} need processes of their own")
        with self._turn:
            self.stop()
            if "assignments" in arguments:
                # Cores and devices are the process's.
                arguments = {**arguments, "assignments": [{"cores": [], "gpus": []}]}
            message = _crossed({"deployment": deployment, "arguments": arguments})
            self._context = WorkerContext(0, 1, self.role, self._log, here=True)
            self._loop = asyncio.new_event_loop()

            def build() -> None:
                with _building:
                    target = load_object(self._target_name)
                    made = target(self._context, message["deployment"], **message["arguments"])
                    self._target = made

            try:
                self._run(Where(self.role, 0, "start", "", None), build)
            except BaseException:
                self.stop()
                raise
            self._deployment = deployment

    def stop(self, grace_seconds: float = 10.0) -> None:
        """Close the target and its event loop, as `Group` ends its ranks."""
        with self._turn:
            target, self._target, self._deployment = self._target, None, None
            loop, self._loop = self._loop, None
            if loop is None:
                return
            close = getattr(target, "close", None)
            if callable(close) and inspect.isawaitable(value := close()):
                loop.run_until_complete(_wait(value))
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    def call(
        self,
        method: str,
        *,
        stage: str,
        iteration: int,
        deadline_seconds: float,
        on_progress: Progress | None = None,
        abort: threading.Event | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """Call the method of the target here, with arguments as they would cross a wire, as `Group`
        calls its ranks."""
        where = Where(self.role, 0, method, stage, iteration)
        message = _crossed({"arguments": arguments})
        with self._turn:
            loop, context = self._loop, self._context
            if not self.alive or loop is None or context is None:
                lost = replace(where, rank=None)
                raise WorkerLost(lost, "the group is not running; call start() first")
            context.stage, context.iteration = stage, iteration
            context.cancelled.clear()
            if on_progress is not None:
                context._send_progress = lambda payload: on_progress({**payload, "rank": 0})

            def invoke() -> Any:
                value = getattr(self._target, method)(**message["arguments"])
                if inspect.isawaitable(value):
                    value = loop.run_until_complete(_wait(value))
                return _crossed({"value": value})["value"]

            try:
                return [self._run(where, invoke)]
            finally:
                context._send_progress = lambda _: None

    def reshard(
        self, deployment: Json, *, stage: str, iteration: int, deadline_seconds: float
    ) -> list[Any]:
        """Call the target's `reshard`, as `Group` does; a target that raises is stopped."""
        where: Json = {"stage": stage, "iteration": iteration, "deadline_seconds": deadline_seconds}
        try:
            results = self.call("reshard", deployment=deployment, **where)
        except WorkerCallFailed:
            self.stop()
            raise
        self._deployment = deployment
        return results

    def _run(self, where: Where, function: Callable[[], Any]) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and self._threads:
            torch.set_num_threads(self._threads)
        try:
            return function()
        except BdbQuit:
            # Somebody left the debugger by `q`.
            raise KeyboardInterrupt from None
        except Exception as error:
            raise WorkerCallFailed(where, Raised.of(error)) from error


def _crossed(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message as the other end of a wire would get it. Raises `WireError`."""
    (received,) = FrameBuffer().feed(encode(message))
    return received


async def _wait(value: Any) -> Any:
    return await value
