"""Games of pettingzoo, in a Python that has it."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import types
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from earl_core.config.environment import EnvironmentConfig
from earl_core.environments.hosting.pool import EnvironmentPool
from earl_core.environments.registry import create
from earl_core.environments.trial.findings import examine
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.gateway.opponents import play_against_policy
from earl_core.rollout.rollout_load import LoadMeter
from earl_core.system.errors import ConfigError, EarlError
from tests.environments.test_tools import in_pool
from tests.foreign import foreign_python
from tests.rollout.asking import STOP, limits, specs
from tests.rollout.chat_models import CHATML, char_tokenizer
from tests.rollout.scripted import SayingEngine

pytestmark = pytest.mark.slow

Play = Callable[..., None]
ZOO = "tests.environments.pettingzoo_worlds"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The classic games want pygame."""
    home = tmp_path_factory.mktemp("zoo")
    return foreign_python(home, "pettingzoo==1.27.0", "pygame==2.6.1")


@pytest.fixture
def play(python: str) -> Play:
    def play(scenario: Callable[[EnvironmentPool], Awaitable[None]], **options: Any) -> None:
        in_pool(scenario, "pettingzoo", tools=(), options=options, python=python)

    return play


ROPE = {"game": f"{ZOO}:Rope"}
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


def squares(text: str) -> list[str]:
    """Those of a board in a message, column by column, as the game numbers them."""
    rows = [
        line.split() for line in text.split("\n\n")[-2 if "Possible" in text else -1].split("\n")
    ]
    return [rows[place % 3][place // 3] for place in range(9)]


def test_tic_tac_toe_of_pettingzoo(play: Play) -> None:
    async def whole(pool: EnvironmentPool, number: int, prompt: int, seed: int) -> list[Any]:
        moves, shown = random.Random(seed), (await pool.reset(number, prompt, seed))[0]["content"]
        mark = "XO"[prompt % 2]
        assert shown.startswith(
            f"Three win.\n\nYou are player_{prompt % 2 + 1}. Answer with a whole number from 0"
        )
        seen = [shown]
        while True:
            cells = squares(shown)
            free = [str(place) for place in range(9) if cells[place] == "."]
            assert cells.count("X") - cells.count("O") == prompt % 2
            assert shown.endswith(f"Possible now: {', '.join(free)}.")
            assert await pool.legal_answers(number) == free
            if len(free) < 8 and len(seen) == 2:
                taken = next(place for place in range(9) if cells[place] != ".")
                refused = await pool.step(number, f"I take {taken}")
                told = refused.messages[0]["content"]
                assert told.startswith("Illegal answer: this action is not possible now.")
                assert (refused.reward, refused.done) == (0.0, False)
            result = await pool.step(number, f"I take {moves.choice(free)}")
            shown = result.messages[0]["content"]
            seen.append(shown)
            if not result.done:
                assert result.reward == 0.0
                continue
            cells = squares(shown)
            won = {cells[a] for a, b, c in LINES if cells[a] == cells[b] == cells[c] != "."}
            expected = 0.0 if not won else 1.0 if won == {mark} else -1.0
            assert result.reward == expected
            assert result.info["outcome"] == {0.0: "draw", 1.0: "win", -1.0: "loss"}[expected]
            assert result.info["side"] == f"player_{prompt % 2 + 1}"
            return [*seen, result.info]

    async def scenario(pool: EnvironmentPool) -> None:
        games = [await whole(pool, number, number % 2, number // 2 % 20) for number in range(80)]
        assert games[:40] == games[40:]
        assert Counter(game[-1]["outcome"] for game in games).keys() == {"win", "draw", "loss"}

    options = {"show": f"{ZOO}:board", "rules": "Three win.", "allowed_errors": 1}
    play(scenario, game="classic/tictactoe-v3", **options)


def test_connect_four_of_pettingzoo_ends_by_an_illegal_answer(play: Play) -> None:
    async def scenario(pool: EnvironmentPool) -> None:
        first = (await pool.reset(0, 0, 5))[0]["content"]
        assert "[[[0, 0], [0, 0]" in first
        result = await pool.step(0, "9")
        assert (result.reward, result.done) == (-2.0, True)
        assert result.info["outcome"] == "illegal"
        rewards: Counter[float] = Counter()
        for number in range(1, 51):
            await pool.reset(number, 0, number)
            while True:
                result = await pool.step(number, (await pool.legal_answers(number))[0])
                if result.done:
                    break
            rewards[result.reward] += 1
        # Four of one's own in the first column against random moves.
        assert rewards[1.0] > 30, rewards

    options = {"agent": "player_0", "illegal_reward": -2.0}
    play(scenario, game="pettingzoo.classic.connect_four_v3:env", **options)


def by_turn(did: list[int], place: int) -> list[float]:
    """The rewards of an agent's turns, by the rules of the game alone."""
    rewards, mine = [0.0], 0
    for code in did:
        who, lets_go = divmod(code, 2)
        if who == place:
            mine += 1
            rewards += [0.0] if mine > 1 else []
            rewards[-1] -= lets_go
        elif not lets_go:
            rewards[-1] += 0.25
    return rewards


def test_rewards_between_turns_and_agents_that_die_early(play: Play) -> None:
    async def scenario(pool: EnvironmentPool) -> None:
        outcomes: Counter[str] = Counter()
        for number in range(60):
            place, moves = number % 3, random.Random(number)
            shown = (await pool.reset(number, number, number))[0]["content"]
            assert f"You are {('ann', 'bob', 'cyd')[place]}." in shown
            rewards = []
            while True:
                result = await pool.step(number, str(int(moves.random() < 0.1)))
                rewards.append(result.reward)
                if result.done:
                    break
            did = [each for each in json.loads(result.messages[0]["content"]) if each >= 0]
            assert rewards == by_turn(did, place)
            outcomes[result.info["outcome"]] += 1
            assert result.info["metrics"]["env_steps"] == len(rewards)
        assert outcomes.keys() >= {"truncated", "out"}

    play(scenario, **ROPE)


def test_openings_that_end_the_game_are_drawn_again(play: Play) -> None:
    async def scenario(pool: EnvironmentPool) -> None:
        for number in range(40):
            # With the prompt 1 bob is played: half of ann's openings end it.
            shown = (await pool.reset(number, 1, number % 20))[0]["content"]
            assert json.loads(shown.split("\n\n")[-1])[:2] == [0, -1]

    async def never(pool: EnvironmentPool) -> None:
        with pytest.raises(EarlError, match="was over before the first move of bob, 20 times"):
            await pool.reset(0, 1, 0)

    play(scenario, game=f"{ZOO}:Fold")
    play(never, game=f"{ZOO}:Team", make_options={"moves": 1})


def test_a_team_draws_and_a_stranger_is_named(play: Play) -> None:
    async def team(pool: EnvironmentPool) -> None:
        for prompt in range(3):
            await pool.reset(prompt, prompt, 0)
            while not (result := await pool.step(prompt, "0")).done:
                pass
            assert result.info["outcome"] == "draw"

    async def crowd(pool: EnvironmentPool) -> None:
        await pool.reset(0, 0, 0)
        with pytest.raises(EarlError, match="an agent cyd, whom its possible_agents lack"):
            await pool.step(0, "0")

    play(team, game=f"{ZOO}:Team", make_options={"moves": 10})
    play(crowd, game=f"{ZOO}:Crowd")


def test_an_old_pettingzoo_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pettingzoo", types.ModuleType("pettingzoo"))
    with pytest.raises(ConfigError, match=r"install pettingzoo>=1\.27, or name a function"):
        create("pettingzoo", {"game": "classic/tictactoe-v3"})


def test_the_policy_plays_the_others(python: str) -> None:
    """With the messages that the agent would get in their place; nobody is trained on that."""
    tokenizer = char_tokenizer(CHATML)
    words: dict[int, list[str]] = {}

    def said(sequence: int, turn: int) -> list[int]:
        # A column is good for three stones of each; what comes then is no number.
        word = "no" if turn == 1 else str(turn)
        words.setdefault(sequence, []).append(word)
        return [*tokenizer.encode(word, add_special_tokens=False), STOP]

    engine = SayingEngine(said, lockstep=False)

    async def run() -> Any:
        options = {
            "game": "classic/connect_four-v3",
            "opponent": "policy",
            "show": f"{ZOO}:stones",
            "allowed_errors": 3,
        }
        pool = EnvironmentPool("pettingzoo", options, python=python, step_timeout_seconds=20.0)
        await pool.start()
        assert pool.wants_policy
        try:
            chat, meter = ChatTokenizer(tokenizer), LoadMeter(1)
            settings = limits(max_turns=4, max_tokens_per_turn=None)
            return await play_against_policy(
                engine, pool, chat, specs(1), settings, meter=meter
            ), meter
        finally:
            await pool.stop()

    (episode,), meter = asyncio.run(run())
    (sample,) = episode.samples
    assert sample.texts[1::2] == ["0", "no", "2", "3"]
    assert sample.texts[0].startswith("You are player_0. Answer with a whole number from 0 to 6.")
    assert sample.texts[0].endswith("0 stones\n\nPossible now: 0, 1, 2, 3, 4, 5, 6.")
    assert "Illegal answer: it has no number." in sample.texts[4]
    # Three of the agent's moves were legal: each was answered.
    assert meter.opponent_calls == 3
    requests = [request for batch in engine.batches for request in batch]
    mine = requests[0].sequence_id
    theirs = [tokenizer.decode(each.tokens) for each in requests if each.sequence_id != mine]
    assert "You are player_1. Answer with" in theirs[0]
    assert "1 stones" in theirs[0]
    assert "Illegal answer: it has no number. A random move was played for you." in theirs[2]
    assert all("player_1" not in each for each in sample.texts)


def test_a_trial_finds_no_fault(python: str) -> None:
    options = {"game": "classic/tictactoe-v3", "allowed_errors": 1}
    config = EnvironmentConfig(name="pettingzoo", options=options, python=python)
    findings = examine(config, episodes=6)
    assert [each for each in findings if each.level == "blocks"] == []
