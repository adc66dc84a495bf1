"""Size classes of segments: four per octave, so that a recycled segment fits the next shard."""

from __future__ import annotations

import mmap

SMALLEST = max(16 * 1024, 4 * mmap.PAGESIZE)


def size_class(size: int) -> int:
    """The least class of at least `size` bytes: 16 KiB, 20, 24, 28, 32, 40, ... always whole pages.

    From 16 KiB on a class is at most a quarter larger than what was asked for. Raises `ValueError`
    for a negative size.
    """
    if size < 0:
        raise ValueError(f"a segment cannot have {size} bytes")
    if size <= SMALLEST:
        return SMALLEST
    octave = 1 << (size.bit_length() - 1)
    quarter = octave // 4
    return -(-size // quarter) * quarter


def is_size_class(size: int) -> bool:
    """Whether a segment can have exactly this size."""
    return size >= SMALLEST and size_class(size) == size
