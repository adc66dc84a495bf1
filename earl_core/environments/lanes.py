"""The threads of a host that run environment calls.

Handing each call to a thread of its own costs more than most calls do. So one thread, a lane, works
off the queue; only when its call takes long are others started beside it. A call over its time is
reported at once, and its lane abandoned.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from earl_core.environments.calls import Calls

logger = logging.getLogger(__name__)

SLOW_CALL_SECONDS = 0.005
"""A call that takes longer lets the queue go on in another lane."""

_MAX_LANES = 64
_REPLIES_PER_SEND = 32
_MAX_ABANDONED = 16
_SPINNING_SHARE = 0.1
_GRACE_SECONDS = 0.5
_CLOCK_TICKS = 100


class Call(NamedTuple):
    """A request of the pool."""

    kind: str
    id: int
    episode: int
    arguments: tuple[Any, ...]


class _Abandoned(BaseException):
    """Raised inside a thread whose call is over its time; no `except Exception` stops it."""


class _Lane:
    def __init__(self, target: Callable[[_Lane], None], number: int) -> None:
        self.call: Call | None = None
        self.since = 0.0
        self.abandoned_at = 0.0
        self.cpu_at_abandonment = 0.0
        self.thread = threading.Thread(
            target=target, args=(self,), name=f"lane-{number}", daemon=True
        )

    def cpu_seconds(self) -> float:
        """CPU time of the thread; 0 when it is gone."""
        try:
            stat = Path(f"/proc/self/task/{self.thread.native_id}/stat").read_text()
        except OSError:
            return 0.0
        fields = stat.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS


class Lanes:
    """Runs calls, those of one episode in order, and reports each with one encoded message.

    calls: runs one call. send: takes encoded replies; called from any thread. timeout_seconds:
    limit of one call, counted from its beginning. concurrent: whether calls may run side by side.
    """

    def __init__(
        self,
        calls: Calls,
        send: Callable[[list[bytes]], None],
        timeout_seconds: float,
        concurrent: bool,
    ) -> None:
        self._calls = calls
        self._send = send
        self._timeout = timeout_seconds
        self._concurrent = concurrent
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._queue: deque[Call] = deque()
        self._waiting: dict[int, list[Call]] = {}
        self._lanes: list[_Lane] = []
        self._abandoned: list[_Lane] = []
        self._replies: list[bytes] = []
        self._started = 0

    def submit(self, calls: list[Call]) -> None:
        """Queues calls."""
        with self._lock:
            self._queue += calls
            if not self._lanes:
                self._add_lane()
            self._wake.notify()

    def watch(self) -> str | None:
        """Ends calls that are over their time and keeps the queue moving; to be called often.

        Returns why this process should be replaced, or None.
        """
        now = time.monotonic()
        failures: list[bytes] = []
        with self._lock:
            for lane in list(self._lanes):
                if lane.call is not None and now - lane.since > self._timeout:
                    failures.append(self._abandon(lane, lane.call, now))
            self._keep_moving(now)
            # A lane keeps its replies for one send, and may be in a slow call by now.
            replies, self._replies = self._replies + failures, []
        if replies:
            self._send(replies)
        return self._why_stuck(now)

    def restless(self) -> bool:
        """Whether calls or replies wait, so that `watch` is needed soon."""
        return bool(self._queue) or bool(self._replies)

    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        with self._lock:
            return not self._queue and all(lane.call is None for lane in self._lanes)

    def _add_lane(self) -> None:
        self._started += 1
        lane = _Lane(self._run, self._started)
        self._lanes.append(lane)
        lane.thread.start()

    def _keep_moving(self, now: float) -> None:
        if not self._queue:
            return
        if any(lane.call is None for lane in self._lanes):
            self._wake.notify()
            return
        if not self._concurrent and any(lane.thread.is_alive() for lane in self._abandoned):
            return
        slow = all(now - lane.since > SLOW_CALL_SECONDS for lane in self._lanes)
        if not slow or len(self._lanes) >= _MAX_LANES:
            return
        # Doubling lets a burst of slow calls, such as requests to a service, start together soon.
        wanted = max(len(self._lanes), 1) if self._concurrent else 1 - len(self._lanes)
        for _ in range(min(wanted, len(self._queue), _MAX_LANES - len(self._lanes))):
            self._add_lane()

    def _run(self, lane: _Lane) -> None:
        try:
            while True:
                with self._lock:
                    if lane.abandoned_at:
                        return
                    call = self._next_call(wait=not self._replies)
                    lane.call, lane.since = call, time.monotonic()
                    replies: list[bytes] = []
                    if call is None or len(self._replies) >= _REPLIES_PER_SEND:
                        replies, self._replies = self._replies, replies
                if replies:
                    self._send(replies)
                if call is None:
                    continue
                reply = self._calls.run(call.kind, call.id, call.episode, call.arguments)
                with self._lock:
                    if lane.abandoned_at:
                        return
                    self._finish(lane, call)
                    if reply is not None:
                        self._replies.append(reply)
        except _Abandoned:
            logger.info("an abandoned call has ended")

    def _next_call(self, wait: bool) -> Call | None:
        """The next call whose episode is free. Holds the lock; None if it would have to wait."""
        while True:
            while not self._queue:
                if not wait:
                    return None
                self._wake.wait()
            call = self._queue.popleft()
            if call.episode not in self._waiting:
                self._waiting[call.episode] = []
                return call
            self._waiting[call.episode].append(call)

    def _finish(self, lane: _Lane, call: Call) -> None:
        lane.call = None
        self._queue.extendleft(reversed(self._waiting.pop(call.episode, [])))

    def _abandon(self, lane: _Lane, call: Call, now: float) -> bytes:
        self._lanes.remove(lane)
        self._abandoned.append(lane)
        lane.abandoned_at, lane.cpu_at_abandonment = now, lane.cpu_seconds()
        # What waits for this episode can only be its close, and the environment is lost.
        self._waiting.pop(call.episode, None)
        self._calls.drop(call.episode)
        detail = "".join(_stack(lane.thread))
        # Ends a thread that runs Python code; one that sleeps in C gets it when it wakes up.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(lane.thread.ident or 0), ctypes.py_object(_Abandoned)
        )
        return self._calls.failure(
            call.id, "timeout", f"{call.kind} took over {self._timeout:g} s, at:\n{detail}"
        )

    def _why_stuck(self, now: float) -> str | None:
        self._abandoned = [lane for lane in self._abandoned if lane.thread.is_alive()]
        if len(self._abandoned) > _MAX_ABANDONED:
            return f"{len(self._abandoned)} abandoned calls still run"
        for lane in self._abandoned:
            seconds = now - lane.abandoned_at
            if seconds < _GRACE_SECONDS:
                continue
            if not self._concurrent:
                return "an abandoned call still runs, and this environment runs one at a time"
            spent = lane.cpu_seconds() - lane.cpu_at_abandonment
            if spent > _SPINNING_SHARE * seconds:
                return "an abandoned call still uses the processor"
        return None


def _stack(thread: threading.Thread) -> list[str]:
    found = None
    with suppress(KeyError):
        found = sys._current_frames()[thread.ident or 0]
    return [] if found is None else traceback.format_stack(found)[-6:]
