"""A cache whose values are bounded by their size together."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Generic, TypeVar

_CACHE_SIZE = 4 * 2**20
_ENTRY_SIZE = 32

K = TypeVar("K")
V = TypeVar("V", bound=Sized)


class SizedCache(Generic[K, V]):
    """A dictionary of sized values that starts anew when they are too many together."""

    def __init__(self) -> None:
        self._values: dict[K, V] = {}
        self._size = 0

    def of(self, key: K, make: Callable[[], V]) -> V:
        """The value of the key, made when it is not there."""
        if key not in self._values:
            value = make()
            self._size += len(value) + _ENTRY_SIZE
            if self._size > _CACHE_SIZE:
                self._values.clear()
                self._size = len(value) + _ENTRY_SIZE
            self._values[key] = value
        return self._values[key]
