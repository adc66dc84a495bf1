"""The script of `benchmarks.warm_start`."""

from __future__ import annotations

import random

from benchmarks.warm_start import GAME, legal_share, move_of, script
from earl_core.environments.registry import create


def test_the_script_wins_where_it_can_and_blocks_where_it_must() -> None:

    chooser = random.Random(0)
    assert move_of("XX3|OO6|789", chooser) == "3"
    assert move_of("X23|OO6|78X", chooser) == "6"
    assert move_of("X2X|O56|789", chooser) == "2"


def test_games_are_legal_and_mostly_won() -> None:
    """Played again, move for move, by the environment itself."""
    outcomes = []
    for number, chat in enumerate(script(60, 5)):
        messages = chat["messages"]
        game = create("tic_tac_toe", GAME)
        heard = game.reset(number, 5)
        for said, answered in zip(messages[::2], messages[1::2], strict=True):
            assert said == heard[-1]
            result = game.step(answered["content"])
            heard = result.messages
        assert result.done
        outcomes.append(result.info["outcome"])
    assert "illegal" not in outcomes
    assert outcomes.count("win") > 40


def test_legal_moves_are_counted_by_move() -> None:
    measured = {"environment/agent_moves": 3.0, "environment/illegal_answers": 0.75}
    assert legal_share(measured) == 0.8
