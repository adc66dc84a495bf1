"""Whose turn it is at each engine, where rollouts of several iterations are open."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from earl_core.system.errors import Cancelled, EarlError

_LOOK_SECONDS = 0.2
"""Between looks at whether whoever waits still has something to play."""


class LeftAhead(EarlError):
    """An iteration that ran ahead ends because an earlier one failed."""


class EngineTurns:
    """The engines of a run, by member. Earlier iterations go first; a share of theirs that comes
    back, because its engine was lost, goes before what a later one has yet to begin.

    left: called with an iteration, in any thread, when an engine has nothing more to play of its
    rollout.
    """

    def __init__(self, left: Callable[[int], None] = lambda iteration: None) -> None:
        self.left = left
        self._changed = threading.Condition()
        self._waiting: Counter[tuple[int, int]] = Counter()
        self._busy: set[int] = set()
        self._stopped = ""

    def ask(self, members: int, iteration: int) -> None:
        """Stand in line at so many engines; `turn` is to be called once for each of them."""
        with self._changed:
            self._waiting.update((member, iteration) for member in range(members))

    @contextmanager
    def turn(
        self, member: int, iteration: int, is_over: Callable[[], bool], asked: bool = False
    ) -> Iterator[None]:
        """Have the engine to oneself in the block. is_over: tells that nothing is left to play.
        asked: `ask` was called for it. Raises `Cancelled` where it is over before the turn comes,
        and `LeftAhead` after `stop`."""
        own = member, iteration
        with self._changed:
            if not asked:
                self._waiting[own] += 1
            try:
                while not (is_over() or self._stopped or self._is_next(*own)):
                    self._changed.wait(_LOOK_SECONDS)
            finally:
                self._waiting[own] -= 1
                self._waiting += Counter()
                self._changed.notify_all()
            if is_over():
                raise Cancelled("there is nothing left to play")
            if self._stopped:
                raise LeftAhead(self._stopped)
            self._busy.add(member)
        try:
            yield
        finally:
            with self._changed:
                self._busy.discard(member)
                self._changed.notify_all()

    def stop(self, why: str) -> None:
        """Have all that wait, now and later, end with `LeftAhead`."""
        with self._changed:
            self._stopped = why
            self._changed.notify_all()

    def _is_next(self, member: int, iteration: int) -> bool:
        earlier = (i < iteration for m, i in self._waiting if m == member)
        return member not in self._busy and not any(earlier)
