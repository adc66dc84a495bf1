"""Lists cut into parts of a bounded size, so that much travels in one call and little is copied."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

_T = TypeVar("_T")

BUCKET_BYTES = 2**26
"""Large enough for a network or a bus, small next to a model."""


def buckets(
    items: Iterable[_T], nbytes: Callable[[_T], int], most: int = BUCKET_BYTES
) -> Iterator[list[_T]]:
    """The items in order, in lists of at most `most` bytes; one that is larger is alone in its."""
    bucket: list[_T] = []
    size = 0
    for item in items:
        if bucket and size + nbytes(item) > most:
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += nbytes(item)
    if bucket:
        yield bucket
