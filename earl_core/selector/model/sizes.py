"""The numbers that candidates are tried with: coarse ones, so that there are few."""

from __future__ import annotations

BYTES_PER_LOGIT = 8
"""Bytes of a logit in a chunk: itself in float32, and its gradient in the dtype of the head's
product or a part of the exponentials."""


def positions_at_a_time(width: float, *, gpu: bool) -> int:
    """Positions whose logits, `width` of them each, the learner computes at a time where nothing
    else is said: 2**25 logits, which are 128 MiB; on a GPU, whose products are to be large, 2,048
    positions or 2**28 logits, whichever are more."""
    return max(2048, int(2**28 // width)) if gpu else max(1, int(2**25 // width))


def logits_chunk(vocabulary: int, *, gpu: bool) -> int:
    """Positions whose logits are computed at a time when memory is short: a power of two, at most
    an eighth of what is usual."""
    return int(2 ** max(0, (positions_at_a_time(vocabulary, gpu=gpu) // 8).bit_length() - 1))


def divisors(number: int) -> list[int]:
    """List the divisors of a number of devices, which need be no power of two: 24 are three hosts
    of eight."""
    return [each for each in range(1, number + 1) if number % each == 0]


def powers(limit: int) -> list[int]:
    """1, 2, 4, … up to the limit."""
    return [2**power for power in range(max(1, limit).bit_length()) if 2**power <= limit]


def smaller_microbatches(asked: int, longest: float) -> list[int]:
    """Token budgets below the one asked for, largest first: halves of it, and in the end the least
    that holds the longest sample; none when the longest sample fills what was asked for.

    Smaller ones would change nothing: no sample is cut.
    """
    least = coarse_above(longest)
    halves = [asked >> power for power in range(1, asked.bit_length())]
    sizes = [size for size in halves if size > least]
    return [*sizes, least] if least < asked else sizes


def coarse(value: float) -> int:
    """The greatest of 1, 2, 3, 4, 6, 8, 12, 16, … that is not above the value; 0 below 1. Coarse,
    so that a growing context does not ask for another candidate every iteration."""
    if value < 1:
        return 0
    power = 1 << (int(value).bit_length() - 1)
    return power + power // 2 if power + power // 2 <= value and power > 1 else power


def coarse_above(value: float) -> int:
    """The least of the same numbers that is not below the value."""
    below = max(1, coarse(value))
    if below >= value:
        return below
    power = 2 ** (below.bit_length() - 1)
    return 2 * power if below > power or power == 1 else power + power // 2
