"""What a source of rewards gave in an iteration: the small summary that ranks tell instead of
rewards, and that is sealed with them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel, Field

from earl_core.algorithms.moments import Moments

SEEN = "guard"
"""Among the outputs of the reward stage's manifest: {source: dumped `Seen`}."""

Bounds = tuple[float, float]
"""The least and the greatest reward of an episode that a source can give."""

HUGE: Bounds = (-1e12, 1e12)
"""Where a source has declared nothing and nothing was seen of it: no return that somebody means
is larger, and sums of squares stay exact enough."""

_NAMED = 32
"""Episodes and prompts that are named at most where half are outside or more: nobody quarantines
them then."""

_ROUNDING = 1e-5
"""Rewards are stored as float32, and a return is a sum of several."""


_ENVIRONMENT = "environment"


def environment_source(label: str) -> str:
    """The name of an environment's own rewards as a source."""
    return f"{_ENVIRONMENT} {label}" if label else _ENVIRONMENT


def function_source(title: str) -> str:
    """The name of a reward function as a source."""
    return f"function {title}"


class Given(NamedTuple):
    """Rewards of one source, episode by episode: float64, int64, int64 and (label, prompt).

    invalid: ids of episodes that got no number at all, which have failed by it.
    """

    rewards: np.ndarray
    episodes: np.ndarray
    groups: np.ndarray
    prompts: Sequence[tuple[str, int]]
    invalid: Sequence[int] = ()


class Seen(BaseModel):
    """episodes, groups: moments of the rewards that lie within the bounds, and of the means of
    these over each group. low, high: their least and greatest; 0 without any. outside: the ids of
    episodes that lie outside: all of them, or some where too many do for being left out.
    number_outside: how many.
    invalid: how many got NaN, infinity or a number that no column holds; some are named. worst: of
    those outside, the one farthest away. prompts: those all of whose episodes lie outside.
    """

    episodes: Moments = Moments()
    groups: Moments = Moments()
    low: float = 0.0
    high: float = 0.0
    outside: list[int] = Field(default_factory=list)
    number_outside: int = 0
    worst: float | None = None
    invalid: int = 0
    named_invalid: list[int] = Field(default_factory=list)
    prompts: list[tuple[str, int]] = Field(default_factory=list)

    @classmethod
    def of(cls, given: Given, bounds: Bounds) -> Seen:
        """Summarise what a source gave."""
        low, high = bounds
        near = _ROUNDING * max(1.0, *(abs(each) for each in bounds if math.isfinite(each)))
        inside = (given.rewards >= low - near) & (given.rewards <= high + near)
        kept, groups = given.rewards[inside], given.groups[inside]
        _, place = np.unique(groups, return_inverse=True)
        sums = np.bincount(place, weights=kept)
        means = sums / np.maximum(np.bincount(place), 1)
        off = given.rewards[~inside]
        distance = np.maximum(low - off, off - high)
        bad = {given.prompts[at] for at in np.flatnonzero(~inside).tolist()}
        good = {given.prompts[at] for at in np.flatnonzero(inside).tolist()}
        return cls(
            episodes=Moments.from_values(kept),
            groups=Moments.from_values(means),
            low=float(kept.min(initial=math.inf)) if kept.size else 0.0,
            high=float(kept.max(initial=-math.inf)) if kept.size else 0.0,
            outside=sorted(given.episodes[~inside].tolist()),
            number_outside=int(off.size),
            worst=float(off[distance.argmax()]) if off.size else None,
            invalid=len(given.invalid),
            named_invalid=sorted(given.invalid)[:_NAMED],
            prompts=sorted(bad - good),
        )

    def merge(self, other: Seen) -> Seen:
        """What both parts saw."""
        spans = [each for each in (self, other) if each.episodes.count]
        worst = [each.worst for each in (self, other) if each.worst is not None]
        return Seen(
            episodes=self.episodes.merge(other.episodes),
            groups=self.groups.merge(other.groups),
            low=min((each.low for each in spans), default=0.0),
            high=max((each.high for each in spans), default=0.0),
            outside=sorted(self.outside + other.outside),
            number_outside=self.number_outside + other.number_outside,
            worst=max(worst, key=abs, default=None),
            invalid=self.invalid + other.invalid,
            named_invalid=sorted(self.named_invalid + other.named_invalid)[:_NAMED],
            prompts=sorted({*self.prompts, *other.prompts}),
        )

    @property
    def mostly_outside(self) -> bool:
        """True when half of the episodes or more lie outside, or got no number."""
        wrong = self.number_outside + self.invalid
        return wrong > 0 and wrong >= self.episodes.count

    def short(self) -> Seen:
        """The same, with few named episodes and prompts."""
        named = {"outside": self.outside[:_NAMED], "prompts": self.prompts[:_NAMED]}
        return self.model_copy(update=named)

    @property
    def numbers(self) -> dict[str, float]:
        """What later iterations compare with: mean, standard error of the mean by groups, standard
        deviation, least and greatest, number of groups; nothing where nobody has a reward."""
        if not self.episodes.count:
            return {}
        return {
            "mean": self.episodes.mean,
            "error": self.groups.std(ddof=1) / math.sqrt(self.groups.count),
            "std": self.episodes.std(),
            "low": self.low,
            "high": self.high,
            "groups": float(self.groups.count),
        }


def merged_sources(parts: Iterable[Mapping[str, Seen]]) -> dict[str, Seen]:
    """The sources of all parts, by name, ascending."""
    whole: dict[str, Seen] = {}
    for part in parts:
        for source, seen in part.items():
            whole[source] = whole[source].merge(seen) if source in whole else seen
    return dict(sorted(whole.items()))


def shortened(seen: Mapping[str, Seen]) -> dict[str, Seen]:
    """All sources of an iteration, with few named episodes where they cannot be left out."""
    return (
        dict(seen) if can_leave(seen) else {source: each.short() for source, each in seen.items()}
    )


def can_leave(seen: Mapping[str, Seen]) -> bool:
    """Tell whether all that lies outside, of whichever source, is fewer than half of the
    iteration's episodes, so that enough is left without it."""
    everyone = sum(
        each.episodes.count + each.number_outside
        for source, each in seen.items()
        if source.startswith(_ENVIRONMENT)
    )
    # Where names were left out already it is not.
    outside = {number for each in seen.values() for number in each.outside}
    short = any(len(each.outside) < each.number_outside for each in seen.values())
    return not short and (not outside or 2 * len(outside) < everyone)


def numbers_of(seen: Mapping[str, Seen]) -> dict[str, float]:
    """The numbers of all sources, as metrics: `of/SOURCE/NAME`."""
    return {
        f"of/{source}/{name}": value
        for source, each in seen.items()
        for name, value in each.numbers.items()
    }
