"""The textarena adapter, on games that EARL does not have itself."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from typing import Any

import pytest

from earl_core.environments.registry import create
from earl_core.system.errors import ConfigError

pytest.importorskip("textarena")

USER = "tests.environments.user_environments"


def make(game: str, **options: Any) -> Any:
    return create("textarena", {"game": game, **options})


def nim_move(text: str) -> str:
    """Takes one from the first pile that is left, by the last board in the text."""
    piles = re.findall(r"pile (\d): (\d+)", text)[-3:]
    return next(f"[{pile} 1]" for pile, size in piles if int(size) > 0)


def play_nim(environment: Any, prompt: int, seed: int) -> list[Any]:
    messages = environment.reset(prompt, seed)
    seen: list[Any] = [messages]
    while True:
        result = environment.step(nim_move(messages[0]["content"]))
        messages = result.messages
        seen.append((messages, result.reward, result.done, result.info))
        if result.done:
            return seen


def test_nim_against_random_legal_moves() -> None:
    environment = make("Nim-v0")
    outcomes: Counter[str] = Counter()
    for index in range(40):
        reward, done, info = play_nim(environment, index, index)[-1][1:]
        assert done
        assert reward == {"win": 1.0, "loss": -1.0}[info["outcome"]]
        assert info["side"] == ("second" if index % 2 else "first")
        outcomes[info["outcome"]] += 1
    assert min(outcomes["win"], outcomes["loss"]) >= 5


def test_observations_are_only_what_is_new() -> None:
    environment = make("Nim-v0", agent_side="second")
    first = environment.reset(0, 1)[0]["content"]
    assert "Rules:" in first
    assert "Player 0 removes" in first
    second = environment.step(nim_move(first)).messages[0]["content"]
    assert "Rules:" not in second
    assert "Player 0 removes" in second
    assert len(re.findall("Player 0 removes", second)) == 1


@pytest.mark.parametrize("game", ["Nim-v0", "PigDice-v0-short", "KuhnPoker-v0"])
def test_two_player_games_repeat_and_leave_the_global_random_alone(game: str) -> None:
    answers = {"Nim-v0": None, "PigDice-v0-short": ["[roll]", "[hold]"], "KuhnPoker-v0": ["[bet]"]}

    def episode(environment: Any, prompt: int, seed: int, other: Any = None) -> list[Any]:
        messages = environment.reset(prompt, seed)
        seen: list[Any] = [messages]
        for turn in range(12):
            choices = answers[game]
            text = (
                nim_move(messages[0]["content"])
                if choices is None
                else choices[turn % len(choices)]
            )
            if other is not None and turn < 2:
                other.reset(turn, turn)
                random.random()
            result = environment.step(text)
            messages = result.messages
            seen.append((messages, result.reward, result.done, result.info))
            if result.done:
                break
        return seen

    random.seed(5)
    state = random.getstate()
    plain = [episode(make(game), index, index) for index in range(6)]
    assert random.getstate() == state
    # Other episodes between the turns, and draws from the global random, change nothing.
    assert plain == [episode(make(game), index, index, make(game)) for index in range(6)]
    assert plain != [episode(make(game), index, index + 1) for index in range(6)]


def test_a_single_player_game() -> None:
    environment = make("GuessTheNumber-v0")

    def solve(prompt: int, seed: int) -> Any:
        low, high = 1, 20
        environment.reset(prompt, seed)
        while True:
            guess = (low + high) // 2
            result = environment.step(f"[{guess}]")
            if result.done:
                return guess, result
            low, high = (
                (guess + 1, high) if "higher" in result.messages[0]["content"] else (low, guess - 1)
            )

    secrets = [solve(index, 0) for index in range(12)]
    assert all(result.reward == 1.0 and result.info["outcome"] == "win" for _, result in secrets)
    assert len({secret for secret, _ in secrets}) > 4
    # The prompt fixes the secret.
    assert [secret for secret, _ in secrets] == [solve(index, 9)[0] for index in range(12)]


def test_mastermind_loses_with_its_own_reward() -> None:
    environment = make("Mastermind-v0", game_options={"max_turns": 2})
    environment.reset(0, 0)
    assert not environment.step("1 2 3 4").done  # brackets are added
    assert not environment.step("[2 1 4 3]").done  # the game counts one turn more than it says
    result = environment.step("[5 6 1 2]")
    assert result.done
    assert result.info["outcome"] in ("loss", "win")
    assert 0.0 <= result.reward <= 1.0


def test_illegal_answers() -> None:
    environment = make("Nim-v0", agent_side="first", illegal_reward=-2.0)
    environment.reset(0, 0)
    result = environment.step("[7 7]")
    assert (result.done, result.reward, result.info["outcome"]) == (True, -2.0, "illegal")
    forgiving = make("Nim-v0", agent_side="first", allowed_errors=1, illegal_reward=None)
    forgiving.reset(0, 0)
    result = forgiving.step("[7 7]")
    assert not result.done
    assert "invalid move" in result.messages[0]["content"]
    assert not forgiving.step("[0 1]").done
    assert not forgiving.step("[7 7]").done
    result = forgiving.step("[7 7]")
    assert (result.done, result.reward, result.info["outcome"]) == (True, -1.0, "illegal")


def test_own_opponents() -> None:
    options = {"opponent": f"{USER}:denying_trader", "add_brackets": False}
    environment = make("SimpleNegotiation-v0-short", **options)
    environment.reset(0, 0)
    for _ in range(10):
        result = environment.step("Nice weather.")
        if result.done:
            break
    assert result.info["outcome"] == "draw"
    assert result.reward == 0.0


@pytest.mark.parametrize(
    ("game", "answers", "options"),
    [
        ("ThreePlayerTicTacToe-v0", "listed", {}),
        ("Poker-v0-small", "[call]", {"players": 3}),
        ("ThreePlayerGOPS-v0", "listed", {}),
        ("Breakthrough-v0-tiny", "[a9a9]", {}),
        ("IteratedRockPaperScissors-v0", "[rock]", {}),
        ("ColonelBlotto-v0-small", "[A20 B0 C0]", {}),
    ],
)
def test_random_opponents_play_legal_moves(
    game: str, answers: str, options: dict[str, Any]
) -> None:
    def episode(prompt: int, seed: int) -> list[Any]:
        environment = make(game, **options)
        seen: list[Any] = [environment.reset(prompt, seed)[0]["content"]]
        deck = [f"[{card}]" for card in ("a", "k", "q", "j", *range(10, 1, -1))]
        while True:
            listed = re.findall(r"\[\w+\]", seen[-1].split("Available Moves:")[-1])
            answer = answers if answers != "listed" else deck.pop() if "GOPS" in game else listed[0]
            result = environment.step(answer)
            seen.append(result.messages[0]["content"])
            if result.done:
                assert math.isfinite(result.reward)
                return [*seen, result.reward, result.info]

    seats = 2 + ("Three" in game or "players" in options)
    played = [episode(prompt, prompt % 2) for prompt in range(2 * seats)]
    sides = [each[-1]["side"] for each in played]
    assert sides == ["first", "second", "player 2"][:seats] * 2
    # What the opponents try on copies leaves no trace.
    assert played == [episode(prompt, prompt % 2) for prompt in range(2 * seats)]
    assert {each[-1]["outcome"] for each in played} <= (
        {"illegal"} if answers == "[a9a9]" else {"win", "draw", "loss"}
    )


def test_an_illegal_opponent_does_not_pay_the_agent() -> None:
    environment = make("Nim-v0", agent_side="first", opponent=f"{USER}:illegal_opponent")
    environment.reset(0, 0)
    with pytest.raises(RuntimeError, match=r"opponent's move .* is illegal"):
        environment.step("[0 1]")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"game": "Nimm-v0"}, "no game 'Nimm-v0': did you mean Nim-v0"),
        ({"game": "Poker-v0", "players": 30}, r"does not start with 30 players \(30: Assertion"),
        ({"game": "Poker-v0", "players": 0}, "option players is 0: give 1 or more"),
        ({"game": "Taboo-v0"}, "does not tell its legal moves"),
        ({"game": "Nim-v0", "game_options": {"heaps": 3}}, "cannot be made with the game_options"),
        ({"game": "Nim-v0", "opponent": "strong"}, "option opponent"),
        ({"game": "Nim-v0", "sides": 2}, "unknown option 'sides'"),
    ],
)
def test_wrong_options_say_what_to_change(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        create("textarena", options)
