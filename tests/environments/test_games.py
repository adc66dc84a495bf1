"""Board games, through the public environment."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earl_core.environments.base import Message
from earl_core.environments.games import connect_four, tic_tac_toe
from earl_core.environments.registry import create
from earl_core.system.errors import ConfigError

GAMES = ("tic_tac_toe", "connect_four")
OPPONENTS = ("random", "greedy", "perfect")
CHEAP = {"tic_tac_toe": {}, "connect_four": {"opponent_depth": 2}}


def make(game: str, **options: Any) -> Any:
    return create(game, {**CHEAP[game], **options})


def play(environment: Any, prompt: int, seed: int, answers: list[str]) -> list[Any]:
    """Everything an episode shows for these answers."""
    seen: list[Any] = [environment.reset(prompt, seed)]
    for answer in answers:
        result = environment.step(answer)
        seen.append((result.messages, result.reward, result.done, result.info))
        if result.done:
            break
    return seen


def legal_game(environment: Any, prompt: int, seed: int) -> Iterator[tuple[list[Message], str]]:
    """Of each turn the new messages, and a random legal answer to them."""
    chooser = random.Random(f"{environment.name}/legal/{prompt}/{seed}")
    messages, done = environment.reset(prompt, seed), False
    while not done:
        answer = chooser.choice(environment.legal_answers())
        yield messages, answer
        result = environment.step(answer)
        messages, done = result.messages, result.done


def outcome(environment: Any, prompt: int, seed: int) -> str:
    answers = [answer for _, answer in legal_game(environment, prompt, seed)]
    return str(play(environment, prompt, seed, answers)[-1][3]["outcome"])


@given(
    game=st.sampled_from(GAMES),
    opponent=st.sampled_from(OPPONENTS),
    style=st.sampled_from(("chat", "compact")),
    prompt=st.integers(0, 1000),
    seed=st.integers(0, 2**63 - 1),
)
@settings(max_examples=60, deadline=None)
def test_legal_play_ends_legally_and_repeats(
    game: str, opponent: str, style: str, prompt: int, seed: int
) -> None:
    environment = make(game, opponent=opponent, style=style)
    turns = legal_game(environment, prompt, seed)
    answers = [answer for _, answer in turns]
    first = play(environment, prompt, seed, answers)
    second = play(make(game, opponent=opponent, style=style), prompt, seed, answers)
    assert first == second
    *middle, (_, reward, done, info) = first[1:]
    assert done
    assert not any(step[2] for step in middle)
    assert info["outcome"] in ("win", "draw", "loss")
    assert reward == {"win": 1.0, "draw": 0.3, "loss": -1.0}[info["outcome"]]
    assert info["metrics"] == {"agent_moves": float(len(answers)), "illegal_answers": 0.0}
    assert info["side"] == ("second" if prompt % 2 else "first")


@given(seed=st.integers(0, 10_000), prompt=st.integers(0, 50))
@settings(max_examples=60, deadline=None)
def test_the_perfect_opponent_never_loses_tic_tac_toe(seed: int, prompt: int) -> None:
    assert outcome(make("tic_tac_toe", opponent="perfect"), prompt, seed) != "win"


def test_perfect_play_of_both_is_a_draw() -> None:
    from earl_core.environments.games.opponents import best_moves

    rules = tic_tac_toe.RULES
    for first in range(9):
        state, rng = rules.play(rules.start(), first), random.Random(first)
        while rules.moves(state) and rules.winner(state) is None:
            state = rules.play(state, rng.choice(best_moves(rules, state, None)))
        assert rules.winner(state) is None


@pytest.mark.parametrize(
    ("game", "opponent", "low", "high"),
    [
        # Known: the first player of random tic-tac-toe wins 58.5 %, the second 28.8 %: 43.7 % on
        # average; random connect four is nearly even.
        ("tic_tac_toe", "random", 0.37, 0.50),
        ("tic_tac_toe", "greedy", 0.02, 0.16),
        ("connect_four", "random", 0.42, 0.57),
        ("connect_four", "greedy", 0.0, 0.10),
        ("connect_four", "perfect", 0.0, 0.05),
    ],
)
def test_win_rates_of_random_play(game: str, opponent: str, low: float, high: float) -> None:
    environment = make(game, opponent=opponent)
    games = 600 if opponent == "random" else 200
    counts = Counter(outcome(environment, index, index) for index in range(games))
    assert low <= counts["win"] / games <= high
    assert set(counts) <= {"win", "draw", "loss"}


def test_deeper_search_is_stronger() -> None:
    """A searching agent of depth 4 beats the opponent of depth 1."""
    from earl_core.environments.games.opponents import make_opponent

    environment, agent = make("connect_four", opponent="perfect", opponent_depth=1), None
    agent = make_opponent("perfect", connect_four.RULES, 4)
    wins = 0
    for index in range(10):
        environment.reset(index, index)
        done = False
        while not done:
            move = agent(environment._state, random.Random(index))
            result = environment.step(str(move + 1))
            done = result.done
        wins += result.info["outcome"] == "win"
    assert wins >= 7


@given(st.lists(st.integers(0, 6), max_size=42))
@settings(max_examples=150, deadline=None)
def test_connect_four_bitboards_equal_a_plain_board(columns: list[int]) -> None:
    rules, state = connect_four.RULES, connect_four.RULES.start()
    board: dict[tuple[int, int], int] = {}
    for column in columns:
        height = sum((row, column) in board for row in range(6))
        assert (column in rules.moves(state)) == (height < 6)
        if height == 6:
            continue
        for player in (0, 1):
            wins = [
                c
                for c in range(7)
                if (h := sum((r, c) in board for r in range(6))) < 6
                and four_in({**board, (h, c): player}, h, c)
            ]
            assert rules.winning_moves(state, player) == wins
        player = rules.to_move(state)
        board[(height, column)] = player
        state = rules.play(state, column)
        won = four_in(board, height, column)
        assert rules.winner(state) == (player if won else None)
        if won:
            break


def four_in(board: dict[tuple[int, int], int], row: int, column: int) -> bool:
    player = board[(row, column)]
    for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
        run = [board.get((row + i * down, column + i * right)) == player for i in range(-3, 4)]
        if any(all(run[i : i + 4]) for i in range(4)):
            return True
    return False


@pytest.mark.parametrize(
    ("text", "move"),
    [("[5]", 4), ("5", 4), ("[5", 4), ("I take 7, not 3.", 6), ("[ 9 ]", 8)],
)
def test_answers_are_read(text: str, move: int) -> None:
    environment = make("tic_tac_toe", agent_side="first")
    environment.reset(0, 0)
    assert environment.read_move(text) == move


@pytest.mark.parametrize("text", ["", "[]", "[0]", "[10]", "no idea", "9" * 5000, "٣", "[-", "½"])
def test_illegal_answers_lose(text: str) -> None:
    environment = make("tic_tac_toe", agent_side="first")
    environment.reset(0, 0)
    result = environment.step(text)
    assert result.done
    assert result.reward == -1.5
    assert result.info["outcome"] == "illegal"
    with pytest.raises(RuntimeError, match="call reset"):
        environment.step("1")


def test_a_taken_square_is_illegal_and_an_own_pattern_is_used() -> None:
    environment = make("tic_tac_toe", agent_side="first", answer_pattern=r"<move>(\d)</move>")
    environment.reset(0, 0)
    assert environment.read_move("I think 3 is bad. <move>5</move>") == 4
    assert environment.read_move("[5]") is None
    environment.step("<move>5</move>")
    assert environment.step("<move>5</move>").info["outcome"] == "illegal"


@pytest.mark.parametrize("style", ["chat", "compact"])
def test_illegal_answers_may_be_forgiven(style: str) -> None:
    environment = make(
        "tic_tac_toe",
        agent_side="first",
        illegal_action="retry",
        max_retries=2,
        retry_reward=-0.25,
        style=style,
    )
    board = environment.reset(0, 0)[-1]["content"].splitlines()[0]
    for _ in range(2):
        result = environment.step("hm")
        assert not result.done
        assert result.reward == -0.25
        assert board in result.messages[0]["content"]
    result = environment.step("hm")
    assert result.done
    assert result.reward == -1.5
    assert result.info["metrics"] == {"agent_moves": 0.0, "illegal_answers": 3.0}


def test_sides_and_opening_moves() -> None:
    environment = make("tic_tac_toe", style="compact")
    assert environment.reset(4, 1)[0]["content"] == "123|456|789"
    openings = {index: environment.reset(index, 7)[0]["content"] for index in range(1, 40, 2)}
    assert all(board.count("X") == 1 for board in openings.values())
    assert len(set(openings.values())) > 5
    # The prompt alone fixes the start; the seed only what comes later.
    assert openings == {i: environment.reset(i, 8)[0]["content"] for i in range(1, 40, 2)}
    later = {
        environment.reset(1, seed)
        and environment.step(environment.legal_answers()[0]).messages[0]["content"]
        for seed in range(30)
    }
    assert len(later) > 3
    assert (
        "X"
        not in make("tic_tac_toe", style="compact", agent_side="first").reset(1, 0)[0]["content"]
    )
    assert (
        "X" in make("tic_tac_toe", style="compact", agent_side="second").reset(0, 0)[0]["content"]
    )


@pytest.mark.parametrize("style", ["chat", "compact"])
@pytest.mark.parametrize("game", GAMES)
def test_messages_use_the_named_characters(game: str, style: str) -> None:
    environment = make(game, style=style, illegal_action="retry", max_retries=9)
    used: set[str] = set()
    for index in range(40):
        for messages, answer in legal_game(environment, index, index):
            used |= set(answer).union(*(message["content"] for message in messages))
    environment.reset(0, 0)
    used |= set(environment.step("?").messages[0]["content"])
    assert used <= set(environment.characters)
    if style == "compact":
        assert len(environment.characters) < 15


def test_messages_are_short_and_the_rules_come_once() -> None:
    environment = make("tic_tac_toe")
    turns = list(legal_game(environment, 1, 3))
    assert [message["role"] for message in turns[0][0]] == ["system", "user"]
    for messages, answer in turns[1:]:
        (message,) = messages
        assert len(message["content"]) < 70
        assert "brackets" not in message["content"]
        assert answer.startswith("[")
        assert answer.endswith("]")
    plain = make("tic_tac_toe", rules_role="user").reset(0, 0)
    assert [message["role"] for message in plain] == ["user"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"oponent": "random"},
            r"unknown option 'oponent': did you mean 'opponent'\? use one of agent_side, answer_p",
        ),
        ({"rewards": {"won": 1}}, r"unknown option 'rewards.won': use one of draw, illegal, loss"),
        ({"opponent": "strong"}, "must be one of 'random', 'greedy', 'perfect'"),
        ({"rewards": {"win": float("nan")}}, "rewards.win"),
        ({"answer_pattern": "("}, "no regular expression"),
        ({"answer_pattern": "(a)(b)"}, "several groups"),
        ({"max_retries": -1}, "max_retries"),
        ({"opponent_depth": 3}, "unknown option 'opponent_depth'"),
    ],
)
def test_wrong_options_say_what_to_change(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        create("tic_tac_toe", options)
