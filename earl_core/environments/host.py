"""A host process: runs environments for an `EnvironmentPool`.

Started as `python -m earl_core.environments.host FD`, FD being its end of a socket pair. It dies
when that socket closes, which the kernel does for a dead pool, and takes its own children along.
While code holds the interpreter lock nobody here can notice anything, so a timer of `faulthandler`,
which needs no lock, then writes all stacks to the log and ends the process.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from functools import partial
from typing import Any

from earl_core.environments import registry
from earl_core.environments.base import EnvironmentConfigError
from earl_core.environments.calls import Calls
from earl_core.environments.lanes import SLOW_CALL_SECONDS, Call, Lanes
from earl_core.environments.wire import FrameReader, encode, frame
from earl_core.secrets import guard_output, redact

_PR_SET_PDEATHSIG = 1
_RECEIVE_BYTES = 1 << 20
_STOP_SECONDS = 3.0


def alive_interval(timeout_seconds: float) -> float:
    """Seconds between two signs of life of a host whose calls may take `timeout_seconds`."""
    return min(1.0, timeout_seconds / 4)


class Host:
    """The main thread's work: receive, watch the lanes, give signs of life."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = FrameReader()
        self._outgoing: list[bytes] = []
        self._out_lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._timeout = 0.0
        self._last_sign = 0.0
        self._stuck = False

    def serve(self) -> None:
        """Runs until the pool says stop or is gone."""
        pending = self._receive_start()
        if pending is None:
            return
        calls, lanes, messages = pending
        while True:
            if ["stop"] in messages:
                self._close_all(calls, lanes)
                return
            if messages:
                lanes.submit([Call(m[0], m[1], m[2], tuple(m[3:])) for m in messages])
            why = lanes.watch()
            if why is not None and not self._stuck:
                self._stuck = True
                self.send([encode(["stuck", why])])
            self._give_sign()
            wait = SLOW_CALL_SECONDS if lanes.restless() else alive_interval(self._timeout) / 2
            received = self._receive(wait)
            if received is None:
                return
            messages = received

    def send(self, messages: list[bytes]) -> None:
        """Sends encoded messages; from any thread. Only one thread sends at a time: one that finds
        another sending leaves its messages to it."""
        with self._out_lock:
            self._outgoing += messages
        while self._outgoing and self._send_lock.acquire(blocking=False):
            try:
                with self._out_lock:
                    batch, self._outgoing = self._outgoing, []
                if batch:
                    self._send_all(frame(batch))
            finally:
                self._send_lock.release()

    def _send_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            # A pool that does not read for long must not look like a stuck interpreter here.
            self._arm()
            _, writable, _ = select.select([], [self._connection], [], 1.0)
            if writable:
                view = view[self._connection.send(view) :]

    def _receive_start(self) -> tuple[Calls, Lanes, list[list[Any]]] | None:
        messages: list[list[Any]] = []
        while not messages:
            received = self._receive(None)
            if received is None:
                return None
            messages = received
        _, name, options, self._timeout = messages.pop(0)
        try:
            registry.check(name, options)
        except EnvironmentConfigError as error:
            self._send_all(frame([encode(["refused", str(error)])]))
            return None
        except BaseException as error:
            text = redact(
                f"The environment {name!r} cannot be made: {type(error).__name__}: {error}"
            )
            self._send_all(frame([encode(["refused", text])]))
            return None
        calls = Calls(partial(registry.create, name, options))
        concurrent = getattr(registry.environment_class(name), "concurrent", True)
        self.send([encode(["ready"])])
        return calls, Lanes(calls, self.send, self._timeout, concurrent), messages

    def _receive(self, wait: float | None) -> list[list[Any]] | None:
        """The messages that arrive within `wait` seconds; None when the pool is gone."""
        readable, _, _ = select.select([self._connection], [], [], wait)
        if not readable:
            return []
        try:
            data = self._connection.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except ConnectionError:
            return None
        return self._reader.feed(data) if data else None

    def _give_sign(self) -> None:
        now = time.monotonic()
        if now - self._last_sign >= alive_interval(self._timeout):
            self._last_sign = now
            self._arm()
            self.send([encode(["alive"])])

    def _arm(self) -> None:
        if self._timeout:
            seconds = self._timeout + 2 * alive_interval(self._timeout)
            faulthandler.dump_traceback_later(seconds, exit=True)

    def _close_all(self, calls: Calls, lanes: Lanes) -> None:
        lanes.submit([Call("close", -1, episode, ()) for episode in calls.episodes()])
        deadline = time.monotonic() + _STOP_SECONDS
        while not lanes.idle() and time.monotonic() < deadline:
            lanes.watch()
            time.sleep(SLOW_CALL_SECONDS)


def main(arguments: list[str]) -> None:
    """Serves the pool at the other end of descriptor `arguments[0]`."""
    if "--die-with-parent" in arguments:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"
    )
    guard_output()
    connection = socket.socket(fileno=int(arguments[0]))
    connection.set_inheritable(False)
    connection.setblocking(False)
    try:
        Host(connection).serve()
    except ConnectionError:
        logging.getLogger(__name__).info("the pool is gone")
    except Exception:
        logging.getLogger(__name__).exception("the host fails")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        connection.close()
        # Threads may hang and environments may have children: nothing of this group may stay.
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
