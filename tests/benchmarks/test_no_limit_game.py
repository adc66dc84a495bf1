"""The game of `benchmarks.no_limit`: who knows the signs gets down, and longer play earns more."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.no_limit_game import ALPHABET, SIGNS, WAYS, Descent, demonstration, right_way
from earl_core.environments.registry import create
from earl_core.system.errors import ConfigError

SMALL = {"wall": 5, "first_zone": 3, "zones": 3}


def play(prompt: int, seed: int, known: int) -> tuple[float, list[Any]]:
    """The return of somebody who knows the first zones, and everything that was shown."""
    game: Any = create("benchmarks.no_limit_game:Descent", SMALL)
    chooser = random.Random(f"{prompt}/{seed}")
    shown: list[Any] = [game.reset(prompt, seed)]
    total, done = 0.0, False
    while not done:
        known_here = game.zone < known
        result = game.step(game.right_answer if known_here else chooser.choice(WAYS))
        shown.append(result)
        total, done = total + result.reward, result.done
    return total, shown


@given(prompt=st.integers(0, 1000), seed=st.integers(0, 2**63 - 1))
@settings(max_examples=40, deadline=None)
def test_knowledge_leads_to_the_bottom_and_play_repeats(prompt: int, seed: int) -> None:
    total, shown = play(prompt, seed, known=3)
    assert total == Descent(**SMALL).floors == 12
    assert shown[-1].info == {"outcome": "bottom", "metrics": {"zones": 3.0}}
    assert play(prompt, seed, known=3) == (total, shown)
    text = "".join(message["content"] for step in shown[1:] for message in step.messages)
    assert set(text) <= set(ALPHABET)


@pytest.mark.parametrize(("known", "floors"), [(0, 0), (1, 3), (2, 6)])
def test_who_does_not_know_a_zone_soon_falls_there(known: int, floors: int) -> None:
    returns = [play(index, index, known)[0] for index in range(300)]
    # One of two ways is right, so that guessing passes one floor on average, hardly a zone.
    assert floors + 0.7 < sum(returns) / len(returns) < floors + 1.4


def test_the_signs_of_a_zone_mean_different_ways() -> None:
    assert all({right_way(first), right_way(second)} == set(WAYS) for first, second in SIGNS)


@pytest.mark.parametrize("text", ["", "0", "3", "12", "x", "1 "])
def test_what_is_no_way_ends_the_episode(text: str) -> None:
    game = Descent(**SMALL)
    game.reset(0, 0)
    result = game.step(text)
    assert result.done
    assert result.reward == 0.0
    assert result.info["outcome"] == "illegal"


def test_demonstrations_take_as_much_care_as_asked() -> None:
    game = Descent(**SMALL)
    answers = [
        answer == right_way(messages[0]["content"].strip(".")[0])
        for number in range(100)
        for messages, answer in demonstration(game, number, care=0.75)
    ]
    assert len(answers) == 1200
    assert 0.7 < sum(answers) / len(answers) < 0.8


def test_wrong_options_say_what_to_change() -> None:
    with pytest.raises(ConfigError, match="'zones' must be from 1 to 26"):
        create("benchmarks.no_limit_game:Descent", {"zones": 27})
