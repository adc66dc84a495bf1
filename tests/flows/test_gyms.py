"""Gymnasium, pettingzoo and reasoning-gym in a Python that has only these, no pydantic of ours.

In one file, so that one installation serves all.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from earl_core.environments.hosting.pool import EnvironmentPool, write_host_archive
from tests.environments.test_tools import in_pool
from tests.flows.runs import LEARNING, Runs
from tests.foreign import foreign_python

pytestmark = pytest.mark.slow

WORLDS = "tests.environments.gymnasium_worlds"
ZOO = "tests.environments.pettingzoo_worlds"
Play = Callable[..., None]
WRONG: dict[str, list[tuple[dict[str, Any], str]]] = {
    "gymnasium": [
        ({"id": "FrozenLake-v7"}, "cannot be made with the make_options {}: Version"),
        ({"id": f"{WORLDS}:TestImage-v0"}, "has 12288 numbers, more than the 256"),
        ({"id": "Blackjack-v1", "actions": ["hit"]}, "Blackjack-v1 has 2 actions"),
        ({"id": "x", "answer_pattern": "("}, "option answer_pattern is no regular"),
        ({"id": 3, "seed": 1}, "option 'id' must be a text (it is 3)"),
        ({"id": "x", "seed": 1}, "unknown option 'seed': use one of actions, allowed_errors"),
    ],
    "pettingzoo": [
        ({"game": "classic/tictactoe-v3", "agent": "X"}, "has no agent 'X': use one of player_1"),
        ({"game": "classic/chequers-v1"}, "cannot be made with the make_options {}: "),
        ({"game": f"{ZOO}:Handshake"}, "makes no AEC environment with possible_agents"),
        ({"game": f"{ZOO}:Rope", "make_options": {"first": "dan"}}, "ValueError: 'dan' is not"),
        ({"game": f"{ZOO}:Rope", "actions": ["hold"]}, f"and {ZOO}:Rope has 2 actions"),
        ({"game": f"{ZOO}:Rope", "opponent": "best"}, "must be one of 'random', 'policy'"),
        ({"game": f"{ZOO}:Rope", "show": f"{ZOO}:no"}, "the option show"),
        ({"game": f"{ZOO}:Rope", "show": f"{ZOO}:AGENTS"}, "no function of (environment, agent)"),
        ({"game": f"{ZOO}:Rope", "show": f"{ZOO}:Rope"}, "no function of (environment, agent)"),
    ],
    "reasoning_gym": [
        ({"dataset": "sums"}, "reasoning-gym has no data set 'sums': use ab, acre"),
        ({"dataset": "gsm_symbolic"}, "does not go on for ever (IndexError"),
        ({"dataset": "chain_sum", "config": {"terms": 2}}, "unexpected keyword argument"),
        ({"dataset": "caesar_cipher", "level": 3}, "rotation must be in range"),
        ({"dataset": "acre", "level": 1}, "has no level 1: ValueError: No curriculum"),
        ({"dataset": [{"name": "gcd"}], "level": 1}, "give them with each of several"),
        ({"dataset": [{"nam": "gcd"}]}, "unknown option 'dataset.0.nam': did you mean 'name'?"),
        ({"dataset": [{"nam": "gcd"}]}, "option 'dataset.0.name' is missing"),
        ({"dataset": [{"name": "gcd", "weight": 0}]}, "option dataset.0.weight is 0: give"),
        ({"dataset": "gcd", "config": {"seed": 1}}, "give it as the option seed"),
    ],
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """reasoning-gym wants another tabulate than vLLM. The classic games want pygame."""
    home = tmp_path_factory.mktemp("gyms")
    zoo = ("pettingzoo==1.27.0", "pygame==2.6.1")
    return foreign_python(home, "gymnasium==1.4.0", "reasoning-gym==0.1.25", *zoo)


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they import takes ten seconds to compile."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "")


@pytest.fixture
def play(python: str) -> Play:
    def play(
        scenario: Callable[[EnvironmentPool], Awaitable[None]], name: str, **options: Any
    ) -> None:
        in_pool(scenario, name, tools=(), options=options, python=python)

    return play


async def episode(pool: EnvironmentPool, number: int, prompt: int, seed: int) -> list[Any]:
    """What one sees that goes down or right at random."""
    moves = random.Random(7)
    seen: list[Any] = [(await pool.reset(number, prompt, seed))[0]["content"]]
    while True:
        result = await pool.step(number, f"Not left, but {moves.choice(['down', 'RIGHT'])}.")
        seen.append((result.messages[0]["content"], result.reward, result.info))
        if result.done:
            return seen


def test_frozen_lake_as_a_picture(play: Play) -> None:
    async def scenario(pool: EnvironmentPool) -> None:
        assert "pydantic" not in pool.versions
        outcomes: Counter[str] = Counter()
        episodes = [await episode(pool, number, 0, number % 20) for number in range(40)]
        assert episodes[:20] == episodes[20:]
        # The seed changes where one slides, not where one starts.
        assert len({str(each) for each in episodes}) > 3
        assert len({each[0] for each in episodes}) == 1
        first = episodes[0][0].split("\n\n")
        assert first[:2] == ["Reach G.", "Answer with one of: left, down, right, up."]
        assert first[2] == 'SFFF\nFHFH\nFFFH\nHFFG\nMarked: "S" on red (line 1, column 1)'
        for each in episodes:
            text, reward, info = each[-1]
            outcomes[info["outcome"]] += 1
            own = {"env_steps": len(each) - 1, "illegal_answers": 0}
            assert info["metrics"] == {"prob": pytest.approx(1 / 3), **own}
            assert reward == float('"G" on red' in text)
        assert outcomes["terminated"] > 30

    actions = ["left", "down", "right", "up"]
    play(scenario, "gymnasium", id="FrozenLake-v1", rules="Reach G.", actions=actions)


def test_what_is_possible_is_told_and_a_mask_refuses_the_rest(play: Play) -> None:
    async def scenario(pool: EnvironmentPool) -> None:
        first = (await pool.reset(0, 0, 0))[0]["content"]
        assert first.endswith("a hall\n\nPossible now: left, right.")
        refused = await pool.step(0, "ahead")
        assert "this action is not possible now" in refused.messages[0]["content"]
        assert (await pool.step(0, "left")).messages[0]["content"] == "a door"
        # Where the environment says nothing, all are.
        last = await pool.step(0, "```\nahead\n```")
        own = {"env_steps": 2, "illegal_answers": 1}
        assert last.info["metrics"] == {"is_success": 1.0, "depth": 0.5, **own}

    async def told(pool: EnvironmentPool) -> None:
        first = (await pool.reset(0, 0, 0))[0]["content"]
        assert first.endswith("a hall\n\nPossible now: open, wait.")

    world: dict[str, Any] = {"id": f"{WORLDS}:TestDoors-v0", "allowed_errors": 1}
    play(scenario, "gymnasium", **world, possible="mask", actions=["left", "ahead", "right"])
    play(told, "gymnasium", **world, possible="commands")


def test_text_actions_and_tries(play: Play) -> None:
    async def scenario(pool: EnvironmentPool) -> None:
        first = (await pool.reset(0, 5, 0))[0]["content"]
        assert first.startswith("Answer with 3 to 3 of the characters abc.\n\n")
        word = first[-3:]
        result = await pool.step(0, "no idea")
        assert (result.reward, result.done) == (0.0, False)
        told = result.messages[0]["content"]
        assert told.startswith("Illegal answer: 'no idea' is not 3 to 3 of the characters abc.")
        assert told.endswith("1 try is left.")
        result = await pool.step(0, f"I say\n```text\n {word}\n```")
        assert (result.reward, result.done) == (1.0, True)
        assert result.info["metrics"] == {"env_steps": 1, "illegal_answers": 1}
        # The prompt fixes the start.
        assert (await pool.reset(1, 5, 1))[0]["content"] == first
        assert (await pool.reset(2, 6, 0))[0]["content"] != first
        await pool.step(1, "x")
        result = await pool.step(1, "x")
        assert (result.reward, result.info["outcome"]) == (-2.0, "illegal")

    id_ = f"{WORLDS}:TestEcho-v0"
    play(scenario, "gymnasium", id=id_, allowed_errors=1, illegal_reward=-2.0)


def test_actions_in_json_until_the_time_limit(play: Play) -> None:
    async def scenario(pool: EnvironmentPool) -> None:
        first = (await pool.reset(0, 0, 0))[0]["content"]
        form = (
            "[a list of whole numbers from [0, 0] to [2, 4], "
            '{"at": a list of numbers of shape [2] from [-1.0, -1.0] to [1.0, 1.0], "name": '
        )
        assert f"Answer with JSON: {form}" in first
        assert first.endswith("name: x\nat: [0.25, 0.3333]")
        for wrong, why in (
            ("Hello", "it is no JSON"),
            ("[" * 100_000, "it is no JSON"),
            ("[[1, 2]]", "it must be a list of 2 values"),
            ('[[1.5, 2], {"at": [0, 0], "name": "y"}]', "[1.5, 2] is not a list of whole"),
            ('[["a"], {"at": [0, 0], "name": "y"}]', "['a'] is not a list of whole"),
            ('[[1, 2], {"at": [0, 2], "name": "y"}]', "is not [a list of whole numbers"),
            ('[[1, 2], {"at": [0, 0]}]', "it must be an object with the keys at, name"),
        ):
            result = await pool.step(0, f"<act>{wrong}</act>")
            assert result.messages[0]["content"].startswith("Illegal answer: ")
            assert why in result.messages[0]["content"]
        for _ in range(2):
            answer = 'So <act>[[2, 4], {"at": [0.5, -1], "name": "y"}]</act>.'
            result = await pool.step(0, answer)
            assert result.reward == 5.5
            assert result.messages[0]["content"] == "at: [0.5, -1.0]\nname: y"
        assert result.info["outcome"] == "truncated"

    pattern = "(?s)<act>(.*)</act>"
    id_ = f"{WORLDS}:TestMixed-v0"
    play(scenario, "gymnasium", id=id_, allowed_errors=9, answer_pattern=pattern)


def test_a_data_set_of_a_level(play: Play) -> None:
    async def scenario(pool: EnvironmentPool) -> None:
        questions = []
        for number, prompt in enumerate((0, 1, 2**40, 0)):
            system, question = await pool.reset(number, prompt, number)
            assert "<answer>answer here</answer>" in system["content"]
            questions.append(question["content"])
            terms = question["content"].split(":")[1].split("=")[0]
            # Level 4 has up to six terms.
            assert 2 <= len(terms.replace("-", "+").split("+")) <= 6
            right = f"{terms} is <answer>{eval(terms)}</answer>"
            result = await pool.step(number, right if prompt else "I think it is 3")
            expected = ("correct", 1.0) if prompt else ("incorrect", 0.0)
            assert (result.info["outcome"], result.reward) == expected
        assert questions[0] == questions[3]
        assert len(set(questions)) == 3

    play(scenario, "reasoning_gym", dataset="chain_sum", level={"num_terms": 4, "num_digits": 1})


def test_several_data_sets(play: Play) -> None:
    async def scenario(pool: EnvironmentPool) -> None:
        metrics: Counter[str] = Counter()
        questions = set()
        for prompt in range(40):
            (question,) = await pool.reset(prompt, prompt, 0)
            questions.add(question["content"])
            result = await pool.step(prompt, "wrong")
            assert result.reward < 0.5
            metrics.update(result.info["metrics"].keys())
        assert metrics["score"] == 40
        assert metrics["score_gsm_symbolic"] > metrics["score_prime_factorization"] > 0
        assert len(questions) == 10

    parts = [{"name": "gsm_symbolic", "weight": 3.0}, {"name": "prime_factorization"}]
    play(scenario, "reasoning_gym", dataset=parts, size=10, system_prompt=None)


def test_wrong_options_say_what_to_change(python: str, tmp_path: Path) -> None:
    cases = [(name, *each) for name, wrong in WRONG.items() for each in wrong]
    program = """
import json, sys
from earl_core.environments.registry import check
for name, options, _ in json.loads(sys.argv[1]):
    try:
        check(name, options)
    except Exception as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))
"""
    path = {"PYTHONPATH": os.pathsep.join((str(write_host_archive(tmp_path)), os.getcwd()))}
    command = (python, "-c", program, json.dumps(cases))
    done = subprocess.run(command, env=path, capture_output=True, text=True, check=True)
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('"')]
    for (_, _, message), each in zip(cases, told, strict=True):
        assert each.startswith("ConfigError: ")
        assert message in each


@pytest.mark.campaign
def test_they_train(python: str, runs: Runs) -> None:
    # A digit is an answer to both; the tiny model reads other characters as unknown ones.
    digits = {"name": "gymnasium", "options": {"id": f"{WORLDS}:TestDigits-v0"}}
    sums = {"name": "reasoning_gym", "options": {"dataset": "chain_sum", "level": 0}}
    zoo = {"name": "pettingzoo", "options": {"game": "classic/tictactoe-v3"}}
    environments = [{**each, "python": python} for each in (digits, sums, zoo)]
    mixture = ("environment=null", f"environments={json.dumps(environments)}")
    runs.train(*LEARNING, "iterations=2", *mixture, "curriculum={}")
    runs.assert_learnt()
    for line in runs.metrics():
        assert line["rollout/episodes_failed"] == 0.0
        assert line["rollout/of/gymnasium/episodes"] > 0
        assert line["rollout/of/reasoning_gym/episodes"] > 0
    zoo_episodes = [line.get("rollout/of/pettingzoo/episodes", 0) for line in runs.metrics()]
    assert sum(zoo_episodes) > 0
    record = json.loads((runs.run() / "environments.json").read_text())["reasoning_gym"]
    assert record["reasoning_gym"] == "0.1.25"
