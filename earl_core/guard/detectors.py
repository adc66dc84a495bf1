"""The findings that there are, each a pure function over numbers, in one table.

What is compared: `history`, the numbers of iterations that have ended, ascending, as metrics.jsonl
has them, and `now`, those of the iteration that is judged (its `iteration`, and no `update/`, which
comes after). An iteration in progress sees the update of the last one that has ended.

Thresholds stand here, each with its reason. They are set so that a clean run has less than one
chance in a thousand of a false finding: a test of an iteration may be wrong with p < 1e-6, for 20
runs of 300 iterations are 6000 tests of each kind. Six standard errors are 1e-9 for normal noise,
and leave room for tails, and for policies that are better and worse for a while.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from earl_core.guard.decision import Finding, not_judged

Numbers = Mapping[str, float]

_COMPARED = (
    "guard/",
    "update/entropy",
    "update/grad_norm",
    "update/importance_",
    "rollout/context/",
)


def is_compared(name: str) -> bool:
    """Tell whether a number of metrics.jsonl is one that iterations are compared by."""
    return name.startswith(_COMPARED)


WINDOW = 12
"""Iterations that a level is compared with: long enough for an error, short enough to follow
learning."""
FEWEST = 6
"""Iterations without which nothing is compared: what five numbers spread says little."""
REMEMBERED = 36
"""Iterations after which a level that stays is the usual one."""
RECENT = 3
"""Iterations that may pass until a shift is found: so many are averaged at most."""
SIGMAS = 6.0
"""Standard errors of a shift of the mean; see above."""
FALL, FALL_RANGE = 0.35, 0.1
"""Parts of the standard deviation of episodes and of their range that a fall has at least: smaller
ones are what learning does when a step was too long, and it recovers by itself. Near the best that
can be had deviations are small, and large batches know small dips by many errors."""
JUMP_SIGMAS, JUMP, JUMP_STEPS = 10.0, 1.0, 4.0
"""Rewards are meant to rise, and learning may set in at once: a rise is impossible only where it is
over a standard deviation of episodes in one iteration and four times the largest step that the run
has made, since exponential growth from a small share of successes at most triples it."""
LESS_LIKELY = 14.0
"""-log of the chance (8e-7) that rewards which differed are all equal in an iteration."""
RETURN_SIGMAS, BEST, DEEP = 5.0, 5, 2.0
"""A return has fallen where the mean of the last three lies so far below the best mean of five
iterations of the run. The best of many is too good by chance, and policies are better and
worse for a while: hence it is twice the least fall, too."""
GROWTH = 1.25
"""Growth of contexts since the best iterations, by which the collapse of long contexts begins: what
episodes vary by is a tenth of it."""
COLLAPSED, GONE = 0.1, 0.02
"""Parts of the entropy at the start below which a policy has stopped to explore. By itself the
first is how learning ends: only with a fallen return, and at half of what it was at the best, or at
the second, is it a finding."""
EXPLODED, EXPLODED_NATS = 1.5, 0.5
"""Entropy over all that the run has seen by so many times and so many nats: a policy that falls
apart, which noise never makes."""
GRADIENT, GRADIENT_NORM = 30.0, 10.0
"""Gradient over the median of those before by so many times, and over so many times what it is
clipped at: norms of clean runs vary by factors of three to five."""
SAMPLE_SHARE = 0.5
"""Part of `update.least_sample_size` below which the weights of an update say nothing; the update
warns of the whole by itself."""


class Settings(NamedTuple):
    """What detectors need of a run's settings. max_grad_norm: None: nothing is clipped."""

    max_grad_norm: float | None = None
    least_sample_size: float = 0.3


class Series(NamedTuple):
    """A number over iterations. at: their numbers. Iterations without it, or where it is not
    finite, are left out."""

    at: tuple[int, ...]
    values: tuple[float, ...]

    @classmethod
    def of(cls, lines: Sequence[Numbers], name: str) -> Series:
        there = [line for line in lines if math.isfinite(line.get(name, math.nan))]
        return cls(
            tuple(int(line["iteration"]) for line in there),
            tuple(float(line[name]) for line in there),
        )


_GIVEN, _MEAN = "guard/of/", "/mean"


def sources_in(line: Numbers) -> list[str]:
    """Sources of rewards of which an iteration has numbers."""
    means = (name for name in line if name.startswith(_GIVEN) and name.endswith(_MEAN))
    return [name[len(_GIVEN) : -len(_MEAN)] for name in means]


def without_sources(line: Numbers) -> Numbers:
    """An iteration's numbers without those of what sources of rewards gave."""
    return {name: value for name, value in line.items() if not name.startswith(_GIVEN)}


def level_shift(history: Sequence[Numbers], now: Numbers, settings: Settings) -> list[Finding]:
    """The mean reward of a source fell, or rose, faster than noise and learning can make it."""
    return [
        found
        for source in sources_in(now)
        if (found := _shift(source, [*history, now])) is not None
    ]


def _usual(lines: Sequence[Numbers], name: str, kind: str) -> list[Numbers]:
    """Those of the last iterations that a number is compared with: not those that had this finding
    already, so that it stays until the number is what it was."""
    recent = [line for line in lines if name in line][-REMEMBERED:]
    return [line for line in recent if not line.get(f"guard/{kind}")]


def _shift(source: str, lines: Sequence[Numbers]) -> Finding | None:
    name, kind = f"guard/of/{source}", "level_shift"
    means = Series.of(lines, f"{name}/mean")
    for length in range(1, min(RECENT, len(means.at)) + 1):
        onset = means.at[-length]
        earlier = [line for line in lines if line["iteration"] < onset]
        before = Series.of(_usual(earlier, f"{name}/mean", kind)[-WINDOW:], f"{name}/mean").values
        if len(before) < FEWEST:
            return None
        level = statistics.median(before[-FEWEST:])
        here = statistics.fmean(means.values[-length:])
        here_error = _thinner(lines, name, length) / length
        error = _noise(lines, name, before) * math.sqrt(here_error + 1 / FEWEST)
        off, spread = here - level, _usual_number(earlier, name, "std")
        steps = [abs(b - a) for a, b in itertools.pairwise(before)]
        rise = max(JUMP_SIGMAS * error, JUMP * spread, JUMP_STEPS * max(steps))
        least = max(SIGMAS * error, _least_fall(earlier, name))
        # What is over lies in the means of several for a while.
        fell = off < -least and means.values[-1] < level - least / 2
        # The level lags behind rewards that rise by themselves.
        if fell or (length == 1 and here - max(level, before[-1]) > rise):
            text = (
                f"the mean of {source} went from {level:.4g} to {here:.4g} within "
                f"{_iterations(length)}, {abs(off) / max(error, 1e-12):.1f} standard errors"
            )
            return Finding(kind=kind, onset=onset, text=text)
    return None


def _least_fall(lines: Sequence[Numbers], name: str) -> float:
    """What the mean of a source falls by at least where it is a finding."""
    return max(FALL * _usual_number(lines, name, "std"), FALL_RANGE * _range(lines, name))


def _range(lines: Sequence[Numbers], name: str) -> float:
    """All that a source gave in the last iterations."""
    recent = [line for line in lines if f"{name}/low" in line][-REMEMBERED:]
    low, high = (f"{name}/{each}" for each in ("low", "high"))
    return max(line[high] for line in recent) - min(line[low] for line in recent)


def _usual_number(lines: Sequence[Numbers], name: str, which: str) -> float:
    """The median of a source's number over iterations."""
    return statistics.median(line[f"{name}/{which}"] for line in lines if f"{name}/{which}" in line)


def _noise(lines: Sequence[Numbers], name: str, before: Sequence[float]) -> float:
    """The standard error of one iteration's mean: what its groups say, what iterations vary by
    beside their trend, or half a group's, which errors that are 0 for a while know nothing of;
    whichever is more."""
    told = [line[f"{name}/error"] for line in lines[-WINDOW:] if f"{name}/error" in line]
    steps = [b - a for a, b in itertools.pairwise(before)]
    middle = statistics.median(steps)
    spread = 1.4826 * statistics.median(abs(step - middle) for step in steps) / math.sqrt(2)
    return max(statistics.median(told), spread, _half_a_group(lines, name), 1e-9)


def _thinner(lines: Sequence[Numbers], name: str, length: int) -> float:
    """By how much the square of a mean's error is larger in the last iterations, where a source had
    fewer groups than it usually has, as a curriculum or a smaller iteration gives it."""
    groups = Series.of(lines, f"{name}/groups").values
    return max(1.0, statistics.median(groups) / max(1.0, min(groups[-length:])))


def _half_a_group(lines: Sequence[Numbers], name: str) -> float:
    return _range(lines, name) / (2 * max(1.0, _usual_number(lines, name, "groups")))


def reward_constant(history: Sequence[Numbers], now: Numbers, settings: Settings) -> list[Finding]:
    """All rewards of a source are equal at once, where they differed by far before."""
    found = []
    for source in sources_in(now):
        name = f"guard/of/{source}"
        if now[f"{name}/low"] != now[f"{name}/high"]:
            continue
        recent = _usual(history, f"{name}/std", "reward_constant")[-RECENT:]
        if len(recent) < RECENT:
            continue
        # Of rewards of two values: the part of the rarer one, and how many independent episodes the
        # error of the mean is worth.
        span = max(max(line[f"{name}/high"] - line[f"{name}/low"] for line in recent), 1e-12)
        squared = min(statistics.median(line[f"{name}/std"] for line in recent) / span, 0.5) ** 2
        rare = (1 - math.sqrt(max(0.0, 1 - 4 * squared))) / 2
        worth = statistics.median(
            (line[f"{name}/std"] / line[f"{name}/error"]) ** 2 if line[f"{name}/error"] else 0.0
            for line in recent
        )
        # Episodes of a group share a prompt.
        worth = min(worth, 2 * _usual_number(recent, name, "groups"))
        worth /= _thinner([*recent, now], name, 1)
        if rare and -worth * math.log1p(-rare) > LESS_LIKELY:
            text = (
                f"all rewards of {source} are {now[f'{name}/mean']:.4g}, after a standard "
                f"deviation of {recent[-1][f'{name}/std']:.4g} in the iteration before"
            )
            kind, onset = "reward_constant", int(now["iteration"])
            found.append(Finding(kind=kind, onset=onset, text=text))
    return found


class _Fall(NamedTuple):
    """A return that fell. onset: the first iteration after the last that was near its best.
    best_at: the last iteration of the best ones."""

    onset: int
    best_at: int
    best: float
    last: float


def _fallen_return(lines: Sequence[Numbers]) -> _Fall | None:
    """The largest fall of a source's mean; None: none has fallen."""
    falls = [fall for source in sources_in(lines[-1]) if (fall := _fall(lines, source)) is not None]
    return max(falls, key=lambda fall: fall.best - fall.last, default=None)


def _fall(lines: Sequence[Numbers], source: str) -> _Fall | None:
    name = f"guard/of/{source}"
    means = Series.of(lines, f"{name}/mean")
    if len(means.values) < BEST + RECENT:
        return None
    last = statistics.fmean(means.values[-RECENT:])
    ends = range(BEST, len(means.values) - RECENT + 1)
    best, end = max((statistics.fmean(means.values[end - BEST : end]), end) for end in ends)
    steps = [b - a for a, b in itertools.pairwise(means.values)]
    noise = max(statistics.median(map(abs, steps)) / 0.954, _half_a_group(lines, name))
    error = noise * math.sqrt(_thinner(lines, name, RECENT) / RECENT + 1 / BEST)
    if best - last > max(RETURN_SIGMAS * error, DEEP * _least_fall(lines, name)):
        near = best - (best - last) / 4
        worse = list(itertools.takewhile(lambda value: value < near, reversed(means.values)))
        return _Fall(means.at[-max(1, len(worse))], means.at[end - 1], best, last)
    return None


def context_growth(history: Sequence[Numbers], now: Numbers, settings: Settings) -> list[Finding]:
    """Contexts grow while the return falls: how runs over long contexts collapse."""
    lines = [*history, now]
    fall = _fallen_return(lines)
    if fall is None:
        return []
    contexts = Series.of(lines, "rollout/context/mean")
    then = [v for at, v in zip(*contexts, strict=True) if fall.best_at - BEST < at <= fall.best_at]
    if not then or len(contexts.values) < RECENT:
        return []
    before, last = statistics.fmean(then), statistics.fmean(contexts.values[-RECENT:])
    if last < GROWTH * before:
        return []
    text = (
        f"contexts grew from {before:.0f} to {last:.0f} tokens while the mean reward fell from "
        f"{fall.best:.4g} (up to iteration {fall.best_at}) to {fall.last:.4g}"
    )
    return [Finding(kind="context_growth", onset=fall.onset, text=text)]


def entropy_collapse(history: Sequence[Numbers], now: Numbers, settings: Settings) -> list[Finding]:
    """The policy hardly explores any more, and its return has fallen."""
    fall, entropy = _fallen_return([*history, now]), Series.of(history, "update/entropy")
    if fall is None or len(entropy.values) < BEST + RECENT:
        return []
    start, last = statistics.median(entropy.values[:BEST]), max(entropy.values[-RECENT:])
    then = [v for at, v in zip(*entropy, strict=True) if at <= fall.best_at]
    if last > max(min(COLLAPSED * start, min(then, default=0.0) / 2), GONE * start):
        return []
    text = (
        f"entropy fell from {start:.3g} to {last:.3g} nats, and the mean reward from "
        f"{fall.best:.4g} (up to iteration {fall.best_at}) to {fall.last:.4g}"
    )
    return [Finding(kind="entropy_collapse", onset=fall.onset, text=text)]


def entropy_growth(history: Sequence[Numbers], now: Numbers, settings: Settings) -> list[Finding]:
    """Entropy rose over all that the run has seen: the policy falls apart."""
    entropy = Series.of(history, "update/entropy")
    if len(entropy.values) < FEWEST + 1:
        return []
    *before, last = entropy.values
    most = max(before)
    if last <= max(EXPLODED * most, most + EXPLODED_NATS):
        return []
    text = f"entropy is {last:.3g} nats, after {most:.3g} at most in all iterations before"
    return [Finding(kind="entropy_growth", onset=entropy.at[-1], text=text)]


def gradient_norm(history: Sequence[Numbers], now: Numbers, settings: Settings) -> list[Finding]:
    """The gradient is far larger than those before, and than what it is clipped at."""
    norms = Series.of(history, "update/grad_norm")
    # Iterations that had nothing to learn from say nothing of the others.
    before = [value for value in norms.values[:-1][-4 * WINDOW :] if value > 0]
    if len(before) < FEWEST:
        return []
    last, usual = norms.values[-1], statistics.median(before)
    floor = GRADIENT_NORM * (settings.max_grad_norm or max(before))
    if last <= max(GRADIENT * usual, floor):
        return []
    text = f"the gradient's norm is {last:.4g}, and was {usual:.4g} (median) before"
    return [Finding(kind="gradient_norm", onset=norms.at[-1], text=text)]


def sample_size(history: Sequence[Numbers], now: Numbers, settings: Settings) -> list[Finding]:
    """The effective sample size of two updates of three was a small part of their tokens, or
    episodes."""
    names = ("update/importance_sample_share", "update/importance_episode_share")
    least = SAMPLE_SHARE * settings.least_sample_size
    small = [
        (int(line["iteration"]), share)
        for line in history[-RECENT:]
        if (share := min((line[name] for name in names if name in line), default=1.0)) < least
    ]
    if len(small) < 2:
        return []
    text = (
        f"the effective sample size was {small[-1][1]:.1%} of its update, and below {least:.1%} "
        f"in {len(small)} of the last {RECENT} iterations"
    )
    return [Finding(kind="sample_size", onset=small[0][0], text=text)]


Detector = Callable[[Sequence[Numbers], Numbers, Settings], list[Finding]]

DETECTORS: Mapping[str, Detector] = {
    "level_shift": level_shift,
    "reward_constant": reward_constant,
    "context_growth": context_growth,
    "entropy_collapse": entropy_collapse,
    "entropy_growth": entropy_growth,
    "gradient_norm": gradient_norm,
    "sample_size": sample_size,
}
"""Detectors over the numbers of iterations, by the kind of their findings."""


def _iterations(number: int) -> str:
    return "one iteration" if number == 1 else f"{number} iterations"


def detect(history: Sequence[Numbers], now: Numbers, settings: Settings) -> list[Finding]:
    """All findings in the numbers of a run. history, now: see above. A detector that fails is a
    finding of its own (`NOT_JUDGED`), and costs none of the others."""
    found: list[Finding] = []
    for name, detector in DETECTORS.items():
        try:
            found += detector(history, now, settings)
        except Exception as error:
            found.append(not_judged(int(now["iteration"]), name, error))
    return found
