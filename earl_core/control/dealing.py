"""Prompts dealt to engines: `rollout.deal`.

By the lengths of past episodes the work of engines is made alike. What lengths are known follows
from the configuration and from what earlier iterations have sealed, never from time, so that a
repeated or resumed rollout is dealt equally.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean, pvariance
from typing import Protocol

from earl_core.run.past_lengths import PastLength

Items = Sequence[int]
"""Prompts or held-out episodes of a job, counted from 0, in the order in which they begin."""

Deal = Callable[[Items, int], list[Items]]
"""Divides items into at most so many parts without empty ones, one for each engine."""


class ByLength(Protocol):
    """A deal by the expected lengths of all items of a job. iteration: of the rollout."""

    def __call__(
        self, lengths: Sequence[float], iteration: int, items: Items, count: int
    ) -> list[Items]: ...


def contiguous(items: Items, count: int) -> list[Items]:
    """Parts of neighbours; their sizes differ by one at most."""
    total = len(items)
    edges = [total * number // count for number in range(count + 1)]
    return [items[a:b] for a, b in itertools.pairwise(edges) if b > a]


def longest_first(
    lengths: Sequence[float], iteration: int, items: Items, count: int
) -> list[Items]:
    """The longest first, each to the engine that has the least to do. Who has the longest one ends
    last, and is another engine in the next iteration, which begins without a barrier."""
    parts: list[list[int]] = [[] for _ in range(count)]
    loads = [0.0] * count
    for item in sorted(items, key=lambda item: (-lengths[item], item)):
        # Where nothing is known of lengths, numbers alone are balanced.
        engine = min(range(count), key=lambda each: (loads[each], len(parts[each]), each))
        parts[engine].append(item)
        loads[engine] += lengths[item]
    first = iteration % count
    return [part for part in parts[first:] + parts[:first] if part]


def histopipe(lengths: Sequence[float], iteration: int, items: Items, count: int) -> list[Items]:
    """Parts of neighbours by rank: the engine that had the shortest ones has the longest in the
    next iteration, which it begins sooner (RhymeRL, arXiv 2508.18588)."""
    ranked = sorted(items, key=lambda item: (lengths[item], item))
    parts = contiguous(ranked, count)
    return parts[::-1] if iteration % 2 else parts


DEALS: dict[str, ByLength] = {"longest_first": longest_first, "histopipe": histopipe}
"""By the names of `rollout.deal`."""


def deal_by_length(
    name: str, lengths: Sequence[PastLength | None], iteration: int, engines: int
) -> Deal:
    """The deal of this name. lengths: of each item in the past, None where nothing is known. In
    neighbours where all are unknown or there is one engine, which then plays as ever."""
    known = [each for each in lengths if each is not None]
    if name not in DEALS or not known or engines == 1:
        return contiguous
    mean = fmean(each.mean for each in known)
    part = _trusted([each.mean for each in known], fmean(each.error for each in known))
    expected = [mean if each is None else mean + part * (each.mean - mean) for each in lengths]
    return partial(DEALS[name], expected, iteration)


def _trusted(means: Sequence[float], error: float) -> float:
    """The part of the differences of these means that is no chance. error: variance of a mean by
    chance. A deal by chance would give engines unequal numbers of prompts for nothing."""
    spread = pvariance(means)
    return max(0.0, 1 - error / spread) if spread else 0.0
