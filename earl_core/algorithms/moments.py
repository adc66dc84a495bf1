"""Count, mean and M2 of sets of numbers, merged exactly instead of gathering the numbers.

These are the only statistics that ranks exchange: three numbers of the batch, never rewards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, Field

Float64Array = NDArray[np.float64]
Int64Array = NDArray[np.int64]


def finite_float64(values: ArrayLike, what: str) -> Float64Array:
    """``values`` as a one-dimensional float64 array.

    Raises:
        ValueError: Not one-dimensional, or a value is NaN or infinite; names the first such
            position.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"The {what} must be one-dimensional, not of shape {array.shape}.")
    bad = np.flatnonzero(~np.isfinite(array))
    if bad.size:
        raise ValueError(
            f"The {what} must be finite, but number {bad[0]} is {array[bad[0]]} "
            f"({bad.size} of {array.size} are not finite); correct what produces them."
        )
    return array


@dataclass(frozen=True, slots=True)
class Moments:
    """``count`` values with their ``mean`` and ``m2``, the sum of squared deviations from the mean.

    Equal values give an ``m2`` of exactly 0 and a ``mean`` of exactly that value, after any merge
    too, so that a batch without variance can be told from one with rounding noise.
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    @classmethod
    def from_values(cls, values: ArrayLike, frequencies: ArrayLike | None = None) -> Moments:
        """Moments of ``values`` [N], each counted ``frequencies`` [N] (integers >= 0) times."""
        numbers = finite_float64(values, "values")
        if frequencies is None:
            times = np.ones(numbers.size, dtype=np.int64)
        else:
            times = np.asarray(frequencies, dtype=np.int64)
            if times.shape != numbers.shape or (times < 0).any():
                raise ValueError(
                    "The frequencies must be non-negative integers, one for each value."
                )
        count = int(times.sum())
        if count == 0:
            return cls()
        # Shifting by one of the values keeps equal values exact and large offsets harmless.
        shift = float(numbers[np.flatnonzero(times)[0]])
        mean = shift + float(((numbers - shift) * times).sum()) / count
        return cls(count, mean, float(((numbers - mean) ** 2 * times).sum()))

    def merge(self, other: Moments) -> Moments:
        """Moments of both sets together (Chan, Golub and LeVeque 1979, pairwise update).

        Merge in one order on all ranks, so that all get the same bits.
        """
        count = self.count + other.count
        if other.count == 0:
            return self
        if self.count == 0:
            return other
        delta = other.mean - self.mean
        share = other.count / count
        return Moments(
            count,
            self.mean + delta * share,
            self.m2 + other.m2 + delta * delta * self.count * share,
        )

    def variance(self, ddof: int = 0) -> float:
        """``m2 / (count - ddof)``; 0 where that has no meaning (``count <= ddof``)."""
        return self.m2 / (self.count - ddof) if self.count > ddof else 0.0

    def std(self, ddof: int = 0) -> float:
        """Square root of :meth:`variance`."""
        return math.sqrt(self.variance(ddof))


@dataclass(frozen=True, slots=True)
class MomentArrays:
    """Moments of N sets as arrays: ``counts`` int64 [N], ``means`` and ``m2s`` float64 [N]."""

    counts: Int64Array
    means: Float64Array
    m2s: Float64Array

    def variance(self, ddof: int = 0) -> Float64Array:
        """float64 [N]; 0 where a set has ``ddof`` values or fewer."""
        divisor = self.counts - ddof
        return np.where(divisor > 0, self.m2s / np.maximum(divisor, 1), 0.0).astype(np.float64)

    def std(self, ddof: int = 0) -> Float64Array:
        """Square root of :meth:`variance`, float64 [N]."""
        return np.sqrt(self.variance(ddof))

    def take(self, index: Int64Array) -> MomentArrays:
        """The moments at ``index`` [K], repeated as often as asked for."""
        return MomentArrays(self.counts[index], self.means[index], self.m2s[index])

    def without(self, values: Float64Array) -> MomentArrays:
        """The moments of each set without one of its values, [N]; a lone value is its own mean."""
        left = np.maximum(self.counts - 1, 1)
        off = values - self.means
        m2s = np.maximum(self.m2s - off**2 * self.counts / left, 0.0)
        return MomentArrays(self.counts - 1, self.means - off / left, m2s)


def group_moments(values: Float64Array, group_ids: Int64Array) -> MomentArrays:
    """Return the moments of each of E values' group, which is whole on one rank: never merged."""
    _, first, inverse = np.unique(group_ids, return_index=True, return_inverse=True)
    size = first.size
    counts = np.bincount(inverse, minlength=size).astype(np.int64)
    shift = values[first]
    sums = np.bincount(inverse, weights=values - shift[inverse], minlength=size)
    means = shift + sums / np.maximum(counts, 1)
    squares = (values - means[inverse]) ** 2
    m2s = np.bincount(inverse, weights=squares, minlength=size).astype(np.float64)
    return MomentArrays(counts, means, m2s).take(inverse)


def integer_ids(group_ids: ArrayLike, count: int) -> Int64Array:
    """``group_ids`` as int64 [count].

    Raises:
        ValueError: Not integers, or not one for each episode.
    """
    ids = np.asarray(group_ids)
    if ids.size == 0:
        ids = ids.astype(np.int64)
    if ids.shape != (count,) or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"The group ids must be {count} integers, one for each episode, "
            f"not an array of {ids.dtype} with shape {ids.shape}."
        )
    return ids.astype(np.int64)


class RankStatistics(BaseModel):
    """`episodes`: trained on. `batch`: their float64 moments; None if the estimator needs none, and
    in a mixture, where `mixture` has those of each environment by its label. `groups`: those with
    an episode that was played, each whole on one rank; None if the estimator compares no groups.
    `turns` and `anchored`: how many, and `Turns.anchored`; None unless turns are compared."""

    episodes: int
    batch: Moments | None = None
    groups: int | None = None
    mixture: dict[str, Moments] = Field(default_factory=dict, exclude_if=lambda value: not value)
    turns: int | None = Field(default=None, exclude_if=lambda value: value is None)
    anchored: int | None = Field(default=None, exclude_if=lambda value: value is None)

    def of_environment(self, label: str) -> Moments | None:
        """Return the moments that an environment's episodes are compared with; a run of one
        environment has the label ''."""
        return self.mixture.get(label, self.batch)


def merge_statistics(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One dumped `RankStatistics`, merged in rank order, so that all ranks get the same bits."""
    ranks = [RankStatistics.model_validate(part) for part in parts]
    episodes = sum(rank.episodes for rank in ranks)
    known = [rank.batch for rank in ranks if rank.batch is not None]
    mixture: dict[str, Moments] = {}
    for rank in ranks:
        for label, moments in rank.mixture.items():
            mixture[label] = mixture.get(label, Moments()).merge(moments)
    return RankStatistics(
        episodes=episodes,
        batch=reduce(Moments.merge, known) if known else None,
        mixture=mixture,
        groups=_total(rank.groups for rank in ranks),
        turns=_total(rank.turns for rank in ranks),
        anchored=_total(rank.anchored for rank in ranks),
    ).model_dump()


def _total(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
