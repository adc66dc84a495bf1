"""What commands that run a flow have in common: Prefect's server, signals, the display."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from flows import server
from flows.cli.display import Display
from flows.cli.interrupt import Interrupted, leave, run_interruptible
from flows.server_access import ServerLost, ServerWatch


class FlowCommand:
    """Runs one flow in this process. `server`: Prefect's, once the flow has begun."""

    server: server.Server

    def __init__(self, runs_directory: str) -> None:
        self._runs_directory = runs_directory
        self._home = server.configure(runs_directory)
        self._starting: server.Server | None = None
        self._watch: ServerWatch | None = None
        self._running: ModuleType | None = None
        self._outcome = "CANCELLED"

    def run(
        self, flow: str, display: Display, stopped: Callable[[], str], **parameters: Any
    ) -> Any:
        """The result of the flow, whose module in `flows` has its name. A signal, or the loss of
        the server, ends this process. stopped: what is then said."""
        try:
            with display:
                result = run_interruptible(
                    lambda: self._work(flow, display, parameters),
                    self._stop,
                    lambda: display.warn(
                        "Stopping the workers; a second Ctrl-C ends everything at once."
                    ),
                    check=self._check,
                )
                display.say("finished")
                return result
        except ServerLost as lost:
            # The flow may wait for the server for ever; the workers are stopped.
            print(f"error: {lost}.\n{stopped()}", file=sys.stderr)
            leave(1)
        except Interrupted as interrupted:
            print(stopped(), file=sys.stderr)
            if interrupted.clean and self._starting is not None:
                self._starting.stop()
            leave(interrupted.exit_code)

    def _work(self, flow: str, display: Display, parameters: dict[str, Any]) -> Any:
        display.say("starting Prefect")
        self._starting = server.start(self._home, self._runs_directory)
        # These imports take about as long as the server's start.
        self._running = import_module("flows.running")
        function = getattr(import_module(f"flows.{flow}"), flow)
        self._starting.ready()
        self.server = self._starting
        self._watch = self.server.watch()
        self._running.set_listener(display.listen)
        return self._running.run_flow(function, self._runs_directory, **parameters)

    def _stop(self) -> None:
        if self._starting is not None and self._watch is None:
            self._starting.stop()
        # Before the module of the flows is there, none of them is.
        if self._running is not None:
            self._running.stop_flows(self._outcome)

    def _check(self) -> None:
        try:
            if self._watch is not None:
                self._watch.check()
        except ServerLost:
            self._outcome = "CRASHED"
            raise
