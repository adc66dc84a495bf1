"""Prompts that are dealt to engines by the lengths of past episodes: `rollout.deal`."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections.abc import Sequence
from typing import Any

import pytest

from earl_core.config import ConfigError, parse_config
from earl_core.control.dealing import deal_by_length
from earl_core.environments.base import Message, StepResult
from earl_core.run.past_lengths import PastLength
from earl_core.trajectory.schema import SAMPLE_BITS
from tests.config.test_stage_keys import BASE
from tests.flows.runs import KILLED, Runs

TEXTS = 4


class Lengthy:
    """Four texts, of which each is answered once more often than the one before."""

    characters = "0123456789[]"

    def reset(self, prompt: int, seed: int) -> list[Message]:
        """Show the text's number."""
        self._left = prompt % TEXTS + 1
        return [{"role": "user", "content": str(self._left)}]

    def step(self, text: str) -> StepResult:
        """Reward even digits."""
        self._left -= 1
        reward = sum(digit in "02468" for digit in text) / 4
        messages: list[Message] = [{"role": "user", "content": str(self._left)}]
        return StepResult(messages, reward, self._left == 0)

    def close(self) -> None:
        """Nothing is held."""


def past(lengths: Sequence[float | None]) -> list[PastLength | None]:
    """Lengths that chance has no part in."""
    return [None if each is None else PastLength(each, 0.0) for each in lengths]


def test_the_longest_first_comes_near_the_best_deal() -> None:
    """By all deals there are: Graham's bound, (4 - 1 / engines) / 3."""
    drawn = random.Random(1)
    for engines, _ in itertools.product((2, 3), range(10)):
        lengths = [drawn.lognormvariate(0, 1.2) for _ in range(7)]
        parts = deal_by_length("longest_first", past(lengths), 0, engines)(range(7), engines)
        assert sorted(itertools.chain(*parts)) == list(range(7))
        assert all(lengths[a] >= lengths[b] for part in parts for a, b in itertools.pairwise(part))
        longest = max(sum(lengths[item] for item in part) for part in parts)
        best = min(
            max(
                sum(length for length, to in zip(lengths, owners, strict=True) if to == engine)
                for engine in range(engines)
            )
            for owners in itertools.product(range(engines), repeat=7)
        )
        assert longest <= best * (4 - 1 / engines) / 3 + 1e-9


def test_the_longest_is_another_engines_in_the_next_iteration() -> None:
    lengths = past([9.0, 1.0, 2.0, 3.0])
    dealt = [deal_by_length("longest_first", lengths, k, 2)(range(4), 2) for k in (4, 5)]
    assert dealt == [[[0], [3, 2, 1]], [[3, 2, 1], [0]]]


def test_differences_that_may_be_chance_are_trusted_in_part() -> None:
    """Not at all where the means deviate as much as they would by chance: numbers are balanced."""
    means = [9.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    spread = statistics.pvariance(means)
    sizes = []
    for error in (0.0, spread / 2, spread):
        lengths = [PastLength(mean, error) for mean in means]
        parts = deal_by_length("longest_first", lengths, 0, 2)(range(6), 2)
        sizes.append(sorted(map(len, parts)))
    assert sizes == [[2, 4], [3, 3], [3, 3]]


def test_ranks_alternate_between_engines() -> None:
    lengths = [5.0, 1.0, None, 2.0, 9.0, 4.0]
    even, odd = (deal_by_length("histopipe", past(lengths), k, 3)(range(6), 3) for k in (6, 7))
    assert even == [[1, 3], [5, 2], [0, 4]] == odd[::-1]


@pytest.mark.parametrize("name", ["contiguous", "longest_first", "histopipe"])
def test_where_nothing_is_known_neighbours_stay_together(name: str) -> None:
    deal = deal_by_length(name, [None] * 5, 1, 2)
    assert deal(range(5), 2) == [range(2), range(2, 5)]
    assert deal(range(1), 2) == [range(1)]
    one = deal_by_length(name, past([3.0, 1.0, 9.0]), 1, 1)
    assert one(range(3), 1) == [range(3)]


@pytest.mark.parametrize("name", ["longest_first", "histopipe"])
def test_a_deal_without_history_is_refused(name: str) -> None:
    rollout = {**BASE["rollout"], "deal": name}
    with pytest.raises(ConfigError, match=r"tracking\.keep_episodes is `none`"):
        parse_config({**BASE, "rollout": rollout, "tracking": {"keep_episodes": "none"}})
    stream: dict[str, Any] = {
        "schedule": {"staleness": 1, "mode": "stream"},
        "algorithm": {"importance_correction": {}},
    }
    with pytest.raises(ConfigError, match=rf"rollout\.deal `{name}`"):
        parse_config({**BASE, **stream, "rollout": rollout})


DEALT = (
    "environment={name: tests.flows.test_deal:Lengthy}",
    "iterations=4",
    "rollout.deal=longest_first",
    "schedule.staleness=1",
    "algorithm.importance_correction={}",
)


def dealt(runs: Runs, name: str = "run") -> list[list[list[int]]]:
    """The prompts of each engine, by iteration."""
    found = []
    for iteration in range(4):
        sealed = runs.run(name) / "iterations" / f"{iteration:06d}" / "rollout.json"
        shards = json.loads(sealed.read_text())["shards"]
        groups = [sorted({(row >> SAMPLE_BITS) // 4 for row in s["row_ids"]}) for s in shards]
        found.append(groups)
    return found


def test_with_one_engine_the_deal_changes_no_bit(runs: Runs) -> None:
    plain = [*DEALT, "rollout.deal=contiguous", "name=plain"]
    assert runs.train_here({"overrides": [*DEALT]}, {"overrides": plain}) == [None, None]
    runs.assert_learnt()
    assert [runs.weights(k) for k in range(4)] == [runs.weights(k, "plain") for k in range(4)]


@pytest.mark.slow
def test_a_resumed_run_deals_as_an_undisturbed_one(runs: Runs) -> None:
    """Side by side, killed ahead and resumed without its shared memory."""
    two = (*DEALT, "stages.rollout.replicas=2")
    runs.train(*two, "name=whole")
    fault = "rollout.seal@3=kill"
    runs.train(*two, "stages.placement=shared", fault=fault, expect=KILLED)
    runs.wait_for_workers_to_end()
    for path in runs.shared_memory():
        path.unlink()
    runs.train(*two, "stages.placement=shared")
    runs.assert_learnt()
    assert [runs.weights(k) for k in range(4)] == [runs.weights(k, "whole") for k in range(4)]
    assert dealt(runs) == dealt(runs, "whole")
    # What is known of rollout 3 is the first two, in which each text has come twice.
    assert dealt(runs) == [[[4 * k, 4 * k + 1], [4 * k + 2, 4 * k + 3]] for k in range(3)] + [
        [[12, 15], [13, 14]]
    ]
