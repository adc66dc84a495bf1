"""Pass rates of a suite's attempts: pass@k with intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from earl_core.rollout.rollout_stats import RolloutStats, wilson_interval
from earl_core.trajectory.samples import Episode


def count_passes(episodes: Iterable[Episode], passing_return: float) -> dict[str, int]:
    """Count the prompts that had c of n attempts pass, by "c/n"; attempts that failed are left
    out."""
    passed: dict[int, list[bool]] = {}
    for episode in episodes:
        if not episode.failed:
            passed.setdefault(episode.group_id, []).append(episode.total_reward >= passing_return)
    return dict(Counter(f"{sum(each)}/{len(each)}" for each in passed.values()))


def pass_at(k: int, passed: int, attempts: int) -> float:
    """The chance that one of k of the attempts has passed, without bias: 1 - C(n-c, k) / C(n, k)
    (Chen et al. 2021, equation 1). k <= attempts."""
    return 1.0 - math.comb(attempts - passed, k) / math.comb(attempts, k)


def pass_rates(passes: Mapping[str, int], attempts: int) -> dict[str, dict[str, float]]:
    """Return the rates by k = 1, 2, 4, ... up to `attempts`: the mean `share` over the prompts, its
    95 % interval (`low`, `high`), and the number of `prompts`, those with at least k attempts that
    did not fail. Where there are none, nothing is known of k.

    The interval is Wilson's for so many prompts: no share of prompts varies more than one of
    successes, so that it is at least as wide as it has to be, also at 0 and 1.
    """
    counts = [(*map(int, key.split("/")), times) for key, times in passes.items()]
    rates = {}
    for k in (2**power for power in range(attempts.bit_length())):
        able = [(pass_at(k, c, n), times) for c, n, times in counts if n >= k]
        if not able:
            break
        prompts = sum(times for _, times in able)
        share = sum(value * times for value, times in able) / prompts
        low, high = wilson_interval(share * prompts, prompts)
        rates[str(k)] = {"share": share, "low": low, "high": high, "prompts": float(prompts)}
    return rates


def suite_results(tallies: Sequence[tuple[str, int, RolloutStats]]) -> dict[str, Any]:
    """`suites`, a table by label, and their `metrics`. tallies: label, attempts, what was played.

    Each suite has `return`, its standard error, `episodes`, `failed`, and `pass`, as `pass_rates`
    has it.
    """
    suites, metrics = {}, {}
    for label, attempts, tally in tallies:
        returns = tally.returns
        rates = pass_rates(tally.passes, attempts)
        suites[label] = {
            "return": returns.mean,
            "error": returns.std(ddof=1) / math.sqrt(max(returns.count, 1)),
            "episodes": tally.episodes,
            "failed": tally.failed,
            "pass": rates,
        }
        if tally.episodes:
            metrics[f"suite/{label}/return"] = returns.mean
        for k, rate in rates.items():
            metrics |= {
                f"suite/{label}/pass_at_{k}": rate["share"],
                f"suite/{label}/pass_at_{k}/low": rate["low"],
                f"suite/{label}/pass_at_{k}/high": rate["high"],
            }
    return {"suites": suites, "metrics": metrics}
