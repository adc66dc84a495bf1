"""Suites beside each other: all numbers of the table have 95 % intervals, and say so."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from earl_core.rollout.pass_rates import suite_results
from earl_core.rollout.rollout_load import RolloutLoad
from earl_core.rollout.rollout_stats import RolloutStats
from tasks.reports.suite_table import suite_rows
from tests.rollout.test_pass_rates import attempts_at


def table(returns: list[float]) -> dict[str, str]:
    tally = RolloutStats.of(attempts_at(0, returns), RolloutLoad())
    tally.passes = {"1/2": 1}
    (row,) = suite_rows(suite_results([("sums", 2, tally)])["suites"])
    return row


def test_the_return_has_an_interval_of_95_percent_as_the_shares_have() -> None:
    returns = np.random.default_rng(0).normal(size=6)
    row = table(returns.tolist())
    assert [name for name in row if name.endswith("(95 %)")] == list(row)[3:]
    mean, half = map(float, row["return (95 %)"].split(" ± "))
    exact = scipy.stats.t.ppf(0.975, 5) * scipy.stats.sem(returns)
    assert (mean, half) == (pytest.approx(returns.mean(), abs=1e-3), pytest.approx(exact, abs=5e-3))


def test_one_episode_has_no_interval_and_none_no_return() -> None:
    assert table([0.5])["return (95 %)"] == "+0.500"
    assert table([])["return (95 %)"] == ""
