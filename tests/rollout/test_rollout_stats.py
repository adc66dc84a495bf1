"""Tallies of parts add up to the tally of the whole."""

from __future__ import annotations

import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from earl_core.algorithms.moments import Moments
from earl_core.rollout.rollout_load import LoadMeter, RolloutLoad
from earl_core.rollout.rollout_stats import (
    RolloutStats,
    evaluation_results,
    merge,
    rollout_metrics,
    wilson_interval,
)
from earl_core.trajectory.samples import Episode, Sample, VersionSpan

GAME = st.tuples(
    st.lists(st.tuples(st.integers(1, 9), st.floats(-2, 2)), min_size=1, max_size=4),
    st.sampled_from(["win", "draw", "loss", "other"]),
)


def episode(number: int, turns: list[tuple[int, float]], outcome: str) -> Episode:
    played = Episode(number, number, number)
    played.samples.append(Sample())
    for size, reward in turns:
        played.samples[0].begin_turn([1, 2])
        played.samples[0].answer([3] * size, [-1.0] * size, [VersionSpan(0, 0, size)])
        played.samples[0].turn_rewards[-1] = reward
    played.finish_reason = "done" if outcome != "other" else "max_turns"
    played.info = {"outcome": outcome, "metrics": {"moves": len(turns)}}
    return played


def tally_of(episodes: list[Episode]) -> RolloutStats:
    meter = LoadMeter(len(episodes))
    meter.end()
    tally = RolloutStats.of(episodes, meter)
    return RolloutStats.model_validate(json.loads(json.dumps(tally.model_dump(mode="json"))))


@given(games=st.lists(GAME, max_size=12), cuts=st.lists(st.integers(0, 12), max_size=3))
def test_parts_add_up(games: list[tuple[list[tuple[int, float]], str]], cuts: list[int]) -> None:
    episodes = [episode(number, *game) for number, game in enumerate(games)]
    edges = [0, *sorted(min(cut, len(games)) for cut in cuts), len(games)]
    parts = [tally_of(episodes[a:b]) for a, b in itertools.pairwise(edges)]
    merged, whole = merge([part] for part in parts), tally_of(episodes)
    assert evaluation_results(merged)["outcomes"] == evaluation_results(whole)["outcomes"]
    numbers = rollout_metrics(merged)
    for name, value in rollout_metrics(whole).items():
        if "second" not in name and "memory" not in name:
            assert abs(numbers[name] - value) < 1e-9, name
    if games:
        returns = Moments.from_values([e.total_reward for e in episodes])
        assert abs(numbers["return/std"] - returns.std()) < 1e-9
        wins = sum(outcome == "win" for _, outcome in games)
        low, high = wilson_interval(wins, len(games))
        if wins:
            assert evaluation_results(merged)["outcomes"]["win"] == {
                "count": wins, "share": wins / len(games), "low": low, "high": high,
            }  # fmt: skip


def test_an_outcome_that_no_episode_had_is_zero() -> None:
    episodes = [episode(0, [(1, 1.0)], "win"), episode(1, [(1, 0.0)], "done")]
    for played, label in zip(episodes, ("chess", "words"), strict=True):
        played.environment = label
    episodes[0].take({"outcome": "win", "outcomes": ["win", "draw", "loss"]})
    episodes[1].take({"outcome": "done", "outcomes": ["done", "illegal"]})
    tally = tally_of(episodes)
    metrics = rollout_metrics(tally)
    shares = {name: value for name, value in metrics.items() if "outcome/" in name}
    assert shares == {
        "outcome/win": 0.5, "outcome/draw": 0.0, "outcome/loss": 0.0, "outcome/done": 0.5,
        "outcome/illegal": 0.0, "of/chess/outcome/win": 1.0, "of/chess/outcome/draw": 0.0,
        "of/chess/outcome/loss": 0.0, "of/words/outcome/done": 1.0, "of/words/outcome/illegal": 0.0,
    }  # fmt: skip
    held_out = evaluation_results(tally)["outcomes"]["draw"]
    low, high = wilson_interval(0, 2)
    assert held_out == {"count": 0, "share": 0.0, "low": low, "high": high}


def test_engines_work_side_by_side_and_their_calls_one_after_the_other() -> None:
    slow = RolloutLoad(seconds=4.0, generated_tokens=40, running_max=8, peak_memory_bytes=100)
    fast = RolloutLoad(seconds=1.0, generated_tokens=10, running_max=2, peak_memory_bytes=30)
    load = merge(
        [[RolloutStats(load=slow)], [RolloutStats(load=fast), RolloutStats(load=fast)]]
    ).load
    assert (load.seconds, load.generated_tokens) == (4.0, 60)
    assert (load.running_max, load.peak_memory_bytes) == (8, 130)
