"""pass@k against every subset counted, and what a suite's table says."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from earl_core.rollout.pass_rates import count_passes, pass_at, pass_rates, suite_results
from earl_core.rollout.rollout_load import RolloutLoad
from earl_core.rollout.rollout_stats import RolloutStats
from earl_core.trajectory.samples import Episode, Sample


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_mean_over_all_subsets(attempts: int, data: st.DataObject) -> None:
    passed = data.draw(st.integers(0, attempts))
    k = data.draw(st.integers(1, attempts))
    outcomes = [number < passed for number in range(attempts)]
    subsets = list(combinations(outcomes, k))
    assert pass_at(k, passed, attempts) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def attempts_at(group: int, returns: list[float], failed: int = 0) -> list[Episode]:
    played = []
    for value in returns:
        sample = Sample(tokens=[1], loss_mask=[1], turn_starts=[0], turn_rewards=[value])
        played.append(Episode(0, group, 0, [sample], "done", {}, "suite"))
    return played + [Episode(0, group, 0, [], "environment_error", {}, "suite")] * failed


def test_a_suite_in_numbers() -> None:
    episodes = [
        *attempts_at(0, [1.0, 1.0, 0.0, 0.0]),
        *attempts_at(1, [0.5, 0.0, 0.9, 0.0]),
        *attempts_at(2, [1.0, 1.0, 1.0], failed=1),
    ]
    tally = RolloutStats.of(episodes, RolloutLoad())
    tally.passes = count_passes(episodes, 1.0)
    assert tally.passes == {"2/4": 1, "0/4": 1, "3/3": 1}
    results = suite_results([("sums", 4, tally)])
    suite = results["suites"]["sums"]
    assert suite["episodes"] == 11
    assert suite["failed"] == 1
    assert suite["pass"]["1"]["share"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert suite["pass"]["2"]["share"] == pytest.approx((5 / 6 + 0 + 1) / 3)
    # One of the prompts had no four attempts.
    assert suite["pass"]["4"] == {
        "share": 0.5,
        "low": pytest.approx(0.0945, abs=1e-3),
        "high": pytest.approx(0.9055, abs=1e-3),
        "prompts": 2.0,
    }
    assert results["metrics"]["suite/sums/pass_at_2"] == suite["pass"]["2"]["share"]


def test_certainty_is_never_claimed() -> None:
    (rate,) = pass_rates({"1/1": 8}, 1).values()
    assert rate["share"] == rate["high"] == 1.0
    assert rate["low"] < 0.7


def test_failed_attempts_are_no_attempts_that_did_not_pass() -> None:
    assert pass_rates({"1/1": 1, "0/3": 1}, 4).keys() == {"1", "2"}
    failed = RolloutStats.of(attempts_at(0, [], failed=2), RolloutLoad())
    assert suite_results([("sums", 2, failed)])["metrics"] == {}
