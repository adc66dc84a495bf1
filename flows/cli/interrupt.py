"""Ctrl-C, SIGTERM and SIGHUP: the first ends the work cleanly, the second at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import NoReturn, TypeVar

T = TypeVar("T")

_POLL_SECONDS = 0.1
_AGAIN_SECONDS = 0.5
GRACE_SECONDS = 9.0
"""Seconds that work may take to end after the first signal."""


class Interrupted(BaseException):
    """The work was ended by a signal. `clean`: it ended by itself, and in time."""

    def __init__(self, number: int, clean: bool) -> None:
        super().__init__(number, clean)
        self.exit_code = 128 + number
        self.clean = clean


def run_interruptible(
    work: Callable[[], T],
    stop: Callable[[], None],
    on_signal: Callable[[], None],
    check: Callable[[], None] = lambda: None,
) -> T:
    """Run `work` in a thread of its own and return or raise what it does.

    Must be called in the main thread, which waits for signals; the libraries that `work` uses then
    install no handlers of their own. At the first SIGINT, SIGTERM or SIGHUP (unless that is
    ignored, as under `nohup`) `on_signal` and `stop` are called; `stop` again and again, because
    the work may be in the middle of opening what must be stopped. Raises `Interrupted` once it has
    ended or `GRACE_SECONDS` are over. A second signal ends the process at once. `check` is called
    all the while and returns at once; what it raises ends the work like a signal and is raised.
    """
    outcome: Future[T] = Future()

    def body() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _silence_lost_terminals()
            if received:
                return  # the kernel and the shell both tell of a terminal that is closed
        if received:
            os._exit(128 + number)
        received.append(number)

    previous = {number: signal.signal(number, handle) for number in _signals()}
    thread = threading.Thread(target=body, name="earl-command", daemon=True)
    thread.start()
    try:
        while thread.is_alive() and not received:
            thread.join(_POLL_SECONDS)
            try:
                check()
            except Exception:
                _stop(thread, stop)
                raise
        if received and thread.is_alive():
            on_signal()
            _stop(thread, stop)
            raise Interrupted(received[0], clean=not thread.is_alive())
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return outcome.result()


def _signals() -> list[signal.Signals]:
    found = [signal.SIGINT, signal.SIGTERM]
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return found if ignored else [*found, signal.SIGHUP]


def _silence_lost_terminals() -> None:
    """Send output for a terminal that was closed nowhere, instead of raising an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            os.dup2(nowhere, stream)
    os.close(nowhere)


def _stop(thread: threading.Thread, stop: Callable[[], None]) -> None:
    deadline = time.monotonic() + GRACE_SECONDS

    def again() -> None:
        while thread.is_alive():
            stop()
            time.sleep(_AGAIN_SECONDS)

    threading.Thread(target=again, name="earl-stop", daemon=True).start()
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(_POLL_SECONDS)


def exit_on_sigterm() -> None:
    """Have SIGTERM end this process as `sys.exit` does: context managers clean up."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def leave(code: int) -> NoReturn:
    """End the process now; what it started notices by itself."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
