"""Several environments share the prompts: parts, cursors, the curriculum."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from functools import reduce
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from earl_core.config.environment import CurriculumConfig, MixedEnvironment
from earl_core.experience.group_returns import GroupReturns
from earl_core.rollout.mixture import Cursor, Place, draw, learn, shares
from earl_core.rollout.rollout_load import RolloutLoad
from earl_core.rollout.rollout_stats import RolloutStats, merge, rollout_metrics
from earl_core.trajectory.samples import Episode, Sample

Weights = dict[str, float]
WEIGHTS = st.dictionaries(st.sampled_from("abcde"), st.floats(0.05, 20.0), min_size=1, max_size=5)


def environments(weights: Weights) -> dict[str, MixedEnvironment]:
    return {
        label: MixedEnvironment(name="prompt", label=label, weight=weight)
        for label, weight in weights.items()
    }


def stored(cursor: Cursor) -> Cursor:
    """As a manifest gives it back."""
    text = json.dumps({label: place.model_dump() for label, place in cursor.items()})
    return {label: Place.model_validate(place) for label, place in json.loads(text).items()}


@given(WEIGHTS, st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_each_has_its_part_and_its_prompts_in_order(weights: Weights, sizes: list[int]) -> None:
    cursor: Cursor = {}
    seen: dict[str, list[int]] = {label: [] for label in weights}
    for prompts in sizes:
        draws, cursor = draw(environments(weights), stored(cursor), None, prompts)
        assert len(draws) == prompts
        for label, prompt in draws:
            seen[label].append(prompt)
    whole = sum(map(Fraction, weights.values()))
    for label, prompts_of in seen.items():
        assert prompts_of == list(range(len(prompts_of)))
        exact = sum(sizes) * Fraction(weights[label]) / whole
        assert abs(len(prompts_of) - exact) < len(weights)


@given(WEIGHTS, st.integers(1, 30), st.integers(1, 30))
def test_two_iterations_draw_what_a_long_one_does(weights: Weights, one: int, two: int) -> None:
    there = environments(weights)
    whole, end = draw(there, {}, None, one + two)
    first, cursor = draw(there, {}, None, one)
    second, cursor = draw(there, stored(cursor), None, two)
    assert (first + second, cursor) == (whole, end)


def test_a_draw_is_mixed_throughout() -> None:
    """Engines are dealt contiguous parts: none may get one environment alone."""
    draws, _ = draw(environments({"a": 3.0, "b": 1.0}), {}, None, 32)
    for start in range(0, 32, 8):
        assert Counter(label for label, _ in draws[start : start + 8]) == {"a": 6, "b": 2}


def played(returns: dict[str, list[list[float]]]) -> RolloutStats:
    """What episodes with these returns, by label and group, came to."""
    episodes = []
    for label, groups in returns.items():
        for group in groups:
            number = len({episode.group_id for episode in episodes})
            for value in group:
                sample = Sample(tokens=[1], loss_mask=[1], turn_starts=[0], turn_rewards=[value])
                episode = Episode(len(episodes), number, 0, [sample], "done", {}, label)
                episodes.append(episode)
    return RolloutStats.of(episodes, RolloutLoad())


def rewarded(rewards: dict[str, list[list[float]]]) -> dict[str, GroupReturns]:
    """As a reward stage's manifest has them. rewards: of groups, by label."""
    return {label: GroupReturns.of(groups) for label, groups in rewards.items()}


def test_the_curriculum_goes_where_groups_differ() -> None:
    there = environments({"solved": 1.0, "hopeless": 1.0, "learning": 1.0, "new": 1.0})
    curriculum = CurriculumConfig(memory=0.5, least_share=0.2)
    _, cursor = draw(there, {}, curriculum, 8)
    # Before anything is known the weights alone decide.
    assert shares(there, {label: Place() for label in there}, curriculum)["new"] == 0.25
    first = rewarded(
        {
            "solved": [[10.0, 10.0], [10.0, 10.0]],
            "hopeless": [[0.0, 0.0], [0.0, 0.0]],
            "learning": [[0.0, 100.0], [100.0, 100.0]],
        }
    )
    cursor = stored(learn(cursor, first, curriculum))
    assert cursor["learning"].spread == 0.25
    assert cursor["solved"].spread == cursor["hopeless"].spread == 0.0
    parts = shares(there, cursor, curriculum)
    # What was not played may be as good as the best; the rest keep their least part.
    assert parts == pytest.approx({"solved": 0.05, "hopeless": 0.05, "learning": 0.45, "new": 0.45})
    # The scale of returns does not matter, and the mean moves.
    small = rewarded({"learning": [[0.0, 1.0], [0.0, 1.0]], "new": [[0.2, 0.4], [0.3, 0.3]]})
    after = learn(cursor, small, curriculum)
    assert after["new"].spread == pytest.approx(0.25)
    assert after["learning"].spread == pytest.approx(0.5 * 0.25 + 0.5 * 0.5 / 100)
    assert after["solved"] == cursor["solved"]


def test_the_curriculum_learns_the_same_whichever_rank_rewarded() -> None:
    parts = [GroupReturns.of([[0.0, 0.1 * number], [0.3, 1 / number]]) for number in range(1, 8)]
    whole = [reduce(GroupReturns.merge, order) for order in (parts, parts[::-1])]
    assert whole[0].spreads != whole[1].spreads
    one, other = (learn({"a": Place()}, {"a": each}, CurriculumConfig()) for each in whole)
    assert one == other


def test_what_each_environment_came_to_is_a_metric() -> None:
    tally = played({"easy": [[1.0, 1.0]], "hard": [[0.0, 0.5]]})
    metrics = rollout_metrics(RolloutStats.model_validate_json(tally.model_dump_json()))
    assert metrics["return/mean"] == 0.625
    assert metrics["of/easy/return/mean"] == 1.0
    assert metrics["of/hard/return/mean"] == 0.25
    assert metrics["of/hard/episodes"] == 2.0
    alone = rollout_metrics(played({"": [[1.0, 0.0]]}))
    assert not any(name.startswith("of/") for name in alone)


def test_parts_of_several_engines_add_up() -> None:
    one = played({"easy": [[1.0, 1.0]], "hard": [[0.0, 0.5]]})
    other = played({"hard": [[2.0, 2.5]]})
    both: Any = merge([[one], [other]])
    assert both.parts["hard"].episodes == 4
    assert both.parts["hard"].returns.mean == 1.25
    assert both.parts["easy"] == one.parts["easy"]
