"""How long somebody waits for answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Waits:
    """Where several answers are waited for side by side, their time counts once. clock: seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._asking, self._asked_at = 0, 0.0
        self.seconds = 0.0
        """In which somebody has waited."""

    @property
    def busy(self) -> bool:
        """True while somebody waits."""
        return self._asking > 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Somebody waits in the block."""
        if not self._asking:
            self._asked_at = self._clock()
        self._asking += 1
        try:
            yield
        finally:
            self._asking -= 1
            if not self._asking:
                self.seconds += self._clock() - self._asked_at
