"""The 95 % interval of a mean, of few numbers too."""

from __future__ import annotations

import math

_Z = 1.959963984540054
_FEWEST = {1: 12.706204736432095, 2: 4.302652729749464}
"""Student's t at 0.975 by degrees of freedom, where the series below is too short."""


def half_interval(std: float, count: float) -> float | None:
    """Half of the 95 % interval of a mean of `count` numbers, by Student's t.

    std: the root of the mean of their squared deviations from that mean (divided by the count, as
    metrics have it). None of fewer than two numbers, which say nothing of their spread.
    """
    freedom = int(count) - 1
    return _t975(freedom) * std / math.sqrt(freedom) if freedom > 0 else None


def _t975(freedom: int) -> float:
    """Student's t at 0.975, within 0.2 % (Abramowitz and Stegun 1964, 26.7.5)."""
    if freedom in _FEWEST:
        return _FEWEST[freedom]
    terms = (
        (_Z**3 + _Z) / 4,
        (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / 96,
        (3 * _Z**7 + 19 * _Z**5 + 17 * _Z**3 - 15 * _Z) / 384,
        (79 * _Z**9 + 776 * _Z**7 + 1482 * _Z**5 - 1920 * _Z**3 - 945 * _Z) / 92160,
    )
    return _Z + sum(term / freedom**power for power, term in enumerate(terms, 1))
