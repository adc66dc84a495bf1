"""A flow at work in a thread of its own, for programs: the caller's thread may have an event loop
already, as a notebook's has, and is free to be interrupted.

Training goes in step with its caller: after each iteration it waits until the next one is wanted.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

from earl_core.system.errors import ConfigError, EarlError
from flows import server
from flows.server_access import ServerWatch

STOP_SECONDS = 60.0
"""Seconds for the workers of a flow that is stopped to end."""

_POLL_SECONDS = 0.2

_lock = threading.Lock()
_watches: dict[str, ServerWatch] = {}


def _flows_beside_server(runs_directory: str) -> tuple[ModuleType, ServerWatch]:
    """`flows.running`, once a server answers; it serves all flows of this process. Raises
    `ServerUnavailable`, and `ConfigError` where prefect knows another server already."""
    with _lock:
        started = server.start(server.configure(runs_directory), runs_directory)
        running = import_module("flows.running")
        started.ready()
        settings = import_module("prefect.settings")
        if settings.PREFECT_API_URL.value() != started.url:
            raise ConfigError(
                "prefect was imported before its server was known, and does not see it: import "
                "flows.api and train before anything that imports prefect, or set PREFECT_API_URL "
                "first"
            )
        if started.url not in _watches:
            _watches[started.url] = started.watch()
        return running, _watches[started.url]


class FlowThread:
    """Runs the flow whose module in `flows` has its name, from its construction on.

    in_step: have it wait after each iteration for `iterations` to be asked on; one flow of a
    process at a time. check: called in the thread before all else; what it raises ends the flow.
    """

    _in_step: FlowThread | None = None

    def __init__(
        self,
        flow: str,
        runs_directory: str,
        *,
        in_step: bool = False,
        check: Callable[[], None] = lambda: None,
        **parameters: Any,
    ) -> None:
        if in_step and FlowThread._in_step is not None:
            raise EarlError(
                "a run is trained in this process already: leave its loop or close it first"
            )
        self._flow, self._runs_directory, self._parameters = flow, runs_directory, parameters
        self._check_first = check
        self._running: ModuleType | None = None
        self._watch: ServerWatch | None = None
        self._finished: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._wanted = threading.Semaphore(0)
        self._stopping = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None
        if in_step:
            FlowThread._in_step = self
        self._thread = threading.Thread(target=self._work, name=f"earl-{flow}", daemon=True)
        self._thread.start()

    def iterations(self) -> Iterator[int]:
        """The number of each iteration once it is finished; the flow then waits for the next
        request. Ends with the flow, and raises what ended it unless that was `stop`."""
        while (number := self._next()) is not None:
            yield number
            self._wanted.release()
        if not self._stopping.is_set():
            self.result()

    def result(self) -> Any:
        """Wait for the flow and return its result; raises what it raises, or `ServerLost`."""
        while self._thread.is_alive():
            self._thread.join(_POLL_SECONDS)
            self._check()
        if self._error is not None:
            raise self._error
        return self._result

    def stop(self) -> None:
        """End the flow and its workers, and wait for that; harmless once it has ended. Raises
        `EarlError` when it takes too long."""
        self._stopping.set()
        deadline = time.monotonic() + STOP_SECONDS
        while self._thread.is_alive():
            # Again and again: it may be in the middle of opening what must be stopped.
            if self._running is not None:
                self._running.stop_flows()
            self._wanted.release()
            self._thread.join(_POLL_SECONDS)
            if time.monotonic() > deadline:
                raise EarlError(
                    f"the flow {self._flow} did not end within {STOP_SECONDS:.0f} s of being "
                    "stopped: end this process; the run can be resumed"
                )

    def _next(self) -> int | None:
        while True:
            try:
                return self._finished.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                self._check()

    def _check(self) -> None:
        if self._watch is not None:
            self._watch.check()

    def _work(self) -> None:
        try:
            self._check_first()
            self._running, self._watch = _flows_beside_server(self._runs_directory)
            function = getattr(import_module(f"flows.{self._flow}"), self._flow)
            if FlowThread._in_step is self:
                self._running.set_listener(self._listen)
            if not self._stopping.is_set():
                self._result = self._running.run_flow(
                    function, self._runs_directory, **self._parameters
                )
        except BaseException as error:
            self._error = error
        finally:
            if FlowThread._in_step is self:
                if self._running is not None:
                    self._running.set_listener(None)
                FlowThread._in_step = None
            self._finished.put(None)

    def _listen(self, stage: str, number: int, event: dict[str, Any]) -> None:
        # What an iteration leaves is on disk by now, and its checkpoint STABLE if one was due.
        if stage == "iteration" and event.get("finished"):
            self._finished.put(number)
            self._wanted.acquire()
