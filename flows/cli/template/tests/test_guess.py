"""The game by itself, and as a run plays it: in a process of its own, replayed and measured."""

from pathlib import Path

from my_game.guess import Guess

from earl_core.config import load_config
from earl_core.environments.trial.findings import examine

RUN = Path(__file__).parents[1] / "run.yaml"


def test_one_guess_wins_and_the_others_lose() -> None:
    outcomes = []
    for digit in "0123456789":
        game = Guess(turns=1)
        game.reset(prompt=0, seed=0)
        outcomes.append(game.step(digit).info["outcome"])
    assert sorted(outcomes) == ["loss"] * 9 + ["win"]


def test_nonsense_is_illegal() -> None:
    game = Guess()
    game.reset(prompt=0, seed=0)
    result = game.step("I do not know")
    assert (result.done, result.reward) == (True, -0.5)


def test_nothing_breaks_training() -> None:
    for environment in load_config(RUN).played.values():
        breaking = [finding for finding in examine(environment) if finding.level == "blocks"]
        assert not breaking, breaking
