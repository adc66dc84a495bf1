"""The environment pool: real host processes, real faults."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from earl_core.environments.base import EnvironmentFailed, StepResult
from earl_core.environments.hosting.pool import EnvironmentPool
from earl_core.environments.registry import create
from tests.environments.user_environments import SPEECHLESS

USER = "tests.environments.user_environments"
COUNTING = f"{USER}:Counting"
WAITING = f"{USER}:Waiting"
BOTH = pytest.mark.parametrize("name", [COUNTING, WAITING])


@asynccontextmanager
async def running(
    name: str, options: Any = None, **settings: Any
) -> AsyncIterator[EnvironmentPool]:
    pool = EnvironmentPool(name, options, **settings)
    await pool.start()
    try:
        yield pool
    finally:
        pids = pool.host_pids
        await pool.stop()
        for pid in pids:
            assert not alive(pid)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def until(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def expected(prompt: int, seed: int, texts: list[str], turns: int = 5) -> list[Any]:
    """What an undisturbed environment answers."""
    environment = create(COUNTING, {"turns": turns})
    return [environment.reset(prompt, seed), *(environment.step(text) for text in texts)]


async def play(pool: EnvironmentPool, episode: int, texts: list[str]) -> list[Any] | str:
    """The replies of a whole episode, or why it failed."""
    try:
        seen: list[Any] = [await pool.reset(episode, episode, 7)]
        for text in texts:
            seen.append(await pool.step(episode, text))
        return seen
    except EnvironmentFailed as error:
        return error.reason if error.episode_id == episode else f"another's: {error}"
    finally:
        await pool.close(episode)


async def play_many(
    pool: EnvironmentPool, episodes: int, odd_texts: dict[int, list[str]]
) -> dict[int, Any]:
    plain = ["a", "b", "c", "d", "e"]
    jobs = [play(pool, index, odd_texts.get(index, plain)) for index in range(episodes)]
    played = dict(enumerate(await asyncio.gather(*jobs)))
    for index in set(played) - set(odd_texts):
        assert played[index] == expected(index, 7, plain), f"episode {index} differs"
    return {index: played[index] for index in odd_texts}


async def test_games_in_lockstep() -> None:
    async with running("tic_tac_toe", {"style": "compact"}, hosts=2) as pool:
        first = await asyncio.gather(*(pool.reset(index, index, 1) for index in range(64)))
        plain = [create("tic_tac_toe", {"style": "compact"}) for _ in range(64)]
        assert list(first) == [game.reset(index, 1) for index, game in enumerate(plain)]
        live = list(range(64))
        for turn in range(9):
            steps = await asyncio.gather(*(pool.step(index, str(turn + 1)) for index in live))
            assert list(steps) == [plain[index].step(str(turn + 1)) for index in live]
            live = [index for index, step in zip(live, steps, strict=True) if not step.done]
        assert not live
        await asyncio.gather(*(pool.close(index) for index in range(64)))
        for index in range(64):
            with pytest.raises(ValueError, match="not open"):
                await pool.step(index, "1")


async def test_faults_cost_their_own_episode_only() -> None:
    """Two hundred games at once; some raise, return nonsense, hang in three ways."""
    async with running(COUNTING, hosts=2, step_timeout_seconds=2.0) as pool:
        odd = await play_many(
            pool,
            200,
            {
                3: ["a", "raise now"],
                20: ["exit"],
                21: ["stop"],
                50: ["a", "sleep 1000"],
                51: ["spin"],
                80: ["a", "nan"],
                81: ["array"],
                82: ["nothing"],
                90: ["sleep 0.3", "b"],
            },
        )
        assert odd[3] == odd[20] == odd[21] == "exception"
        assert odd[50] == odd[51] == "timeout"
        assert odd[80] == odd[81] == odd[82] == "invalid_result"
        assert odd[90] == expected(90, 7, ["sleep 0", "b"])[:1] + odd[90][1:]


@BOTH
async def test_exceptions_that_are_no_errors_cost_their_episode_too(name: str) -> None:
    async with running(name, step_timeout_seconds=2.0) as pool:
        plays = (play(pool, n, ["a", said]) for n, said in enumerate(("own", "generator")))
        assert await asyncio.wait_for(asyncio.gather(*plays), 100) == ["exception"] * 2
        assert pool.host_restarts == 0


async def test_results_that_cannot_be_used_cost_their_episode_and_say_why() -> None:
    limits = r"a finite number between -1e\+30 and 1e\+30"
    reasons = {
        "infinite": f"The reward must be {limits}, not inf",
        "huge": r"The reward .*not 1e\+300: scale it",
        "unending": "The reward .*not a larger integer",
        "text_reward": "The reward .*not '1'",
        "surrogate": "content cannot be encoded as UTF-8",
        "role": "role must be one of system, user, assistant, tool, not 'referee'",
        "calls": "tool_calls must be a list of calls",
        "no_calls": "tool_calls must be a list of calls .*not None",
        "metric_text": rf"info\[\"metrics\"\]\['a'\] must be {limits}, not 'x'",
        "metric_nan": r"\['a'\] must be .*not nan",
        "metric_list": "must be a dict of numbers by name",
        "vast": r"over the limit of 67,108,864",
    }
    async with running(COUNTING) as pool:
        for episode, (command, reason) in enumerate(reasons.items()):
            await pool.reset(episode, 1, 7)
            with pytest.raises(EnvironmentFailed, match=f"invalid_result[\\s\\S]*{reason}"):
                await pool.step(episode, command)
        with pytest.raises(EnvironmentFailed, match=r"reset\(\) must return at least one message"):
            await pool.reset(100, SPEECHLESS, 7)
        await pool.reset(101, 1, 7)
        result = await pool.step(101, "numbers")
        assert (result.reward, result.info) == (0.25, {"metrics": {"a": 0.5, "b": 1.0, "c": 3.0}})
        await pool.reset(103, 1, 7)
        assert (await pool.step(103, "keys")).info == {"counts": {"1": [2, 3]}}
        await pool.reset(102, 1, 7)
        with pytest.raises(EnvironmentFailed, match=r"told to fail: \\ud800") as raised:
            await pool.step(102, "raise \ud800")
        assert str(raised.value).encode()
        assert pool.host_restarts == 0


async def test_a_held_interpreter_lock_costs_one_episode() -> None:
    async with running(COUNTING, hosts=1, step_timeout_seconds=0.8) as pool:
        odd = await play_many(pool, 200, {77: ["a", "b", "hold"]})
        assert odd[77] == "timeout"
        assert pool.host_restarts >= 1


async def test_a_crash_costs_one_episode() -> None:
    async with running(COUNTING, hosts=2) as pool:
        odd = await play_many(pool, 60, {11: ["a", "die"], 12: ["a", "raise x"]})
        assert odd == {11: "host_died", 12: "exception"}


async def test_a_thread_that_cannot_be_ended_costs_its_host_only() -> None:
    async with running(COUNTING, step_timeout_seconds=0.5) as pool:
        await pool.reset(1, 1, 7)
        await pool.step(1, "a")
        await pool.reset(2, 2, 7)
        (old,) = pool.host_pids
        with pytest.raises(EnvironmentFailed, match="timeout"):
            await pool.step(2, "stubborn")
        for _ in range(1200):
            if pool.host_restarts:
                break
            await asyncio.sleep(0.05)
        assert pool.host_restarts == 1
        assert not alive(old)
        assert await pool.step(1, "b") == expected(1, 7, ["a", "b"])[-1]


async def test_a_killed_host_is_not_noticed() -> None:
    """SIGKILL between the calls and under them; every episode goes on as if nothing had been."""
    async with running(COUNTING, {"turns": 9}, hosts=2) as pool:
        texts = [f"t{turn}" for turn in range(9)]
        episodes = range(100)
        seen = {i: [await pool.reset(i, i, 7)] for i in episodes}
        for turn, text in enumerate(texts):
            if turn == 2:
                os.kill(pool.host_pids[0], signal.SIGKILL)
            steps = asyncio.gather(*(pool.step(i, text) for i in episodes))
            if turn == 5:
                await asyncio.sleep(0)
                os.kill(pool.host_pids[1], signal.SIGKILL)
            for i, step in zip(episodes, await steps, strict=True):
                seen[i].append(step)
        assert pool.host_restarts == 2
        for i in episodes:
            assert seen[i] == expected(i, 7, texts, turns=9)


async def test_a_stopped_host_is_replaced() -> None:
    """SIGSTOP: not even its own timer runs, only the missing signs of life tell."""
    async with running(COUNTING, step_timeout_seconds=0.4) as pool:
        await pool.reset(1, 1, 7)
        os.kill(pool.host_pids[0], signal.SIGSTOP)
        assert await pool.step(1, "a") == expected(1, 7, ["a"])[-1]
        assert pool.host_restarts == 1


async def test_a_host_that_dies_by_chance_fails_nobody(tmp_path: Path) -> None:
    async with running(COUNTING, hosts=1) as pool:
        await pool.reset(1, 1, 7)
        await pool.reset(2, 2, 7)
        text = f"die_once {tmp_path / 'dead'}"
        one, two = await asyncio.gather(pool.step(1, text), pool.step(2, "x"))
        (plain,) = expected(1, 7, ["x"])[-1].messages
        assert one.messages[0]["content"] == plain["content"].removesuffix("x") + text
        assert two == expected(2, 7, ["x"])[-1]


async def test_a_host_killed_as_it_starts_is_started_again(tmp_path: Path) -> None:
    options = {"path": str(tmp_path / "killed")}
    async with running(f"{USER}:KilledOnce", options=options) as pool:
        await pool.reset(1, 1, 7)
        assert isinstance(await pool.step(1, "a"), StepResult)
    assert (tmp_path / "killed").exists()


async def test_an_environment_that_cannot_be_rebuilt_says_so() -> None:
    async with running(f"{USER}:Unseeded") as pool:
        await pool.reset(1, 1, 7)
        await pool.step(1, "a")
        await pool.reset(2, 2, 7)
        os.kill(pool.host_pids[0], signal.SIGKILL)
        with pytest.raises(EnvironmentFailed, match="randomness come from the prompt") as raised:
            await pool.step(1, "b")
        assert raised.value.reason == "not_deterministic"
        assert raised.value.by_infrastructure
        assert isinstance(await pool.step(2, "a"), StepResult)


async def test_what_the_configuration_says_cannot_be_replayed_is_not() -> None:
    async with running(COUNTING, deterministic=False) as pool:
        await pool.reset(1, 1, 7)
        await pool.step(1, "a")
        os.kill(pool.host_pids[0], signal.SIGKILL)
        with pytest.raises(EnvironmentFailed, match="cannot be played again") as raised:
            await pool.step(1, "b")
        assert raised.value.by_infrastructure
        await pool.reset(1, 1, 7)
        assert await pool.step(1, "a") == expected(1, 7, ["a"])[-1]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (COUNTING, "sleep 1000"),
        (COUNTING, "spin"),
        (WAITING, "wait 1000"),
        (WAITING, "sleep 1000"),
        (WAITING, "spin"),
    ],
)
async def test_a_call_over_its_deadline_costs_its_episode_and_its_host(
    name: str, text: str
) -> None:
    """Asleep or busy, in a thread or in the event loop, which stands still in the last two. A
    coroutine that waits is cancelled instead."""
    async with running(name, step_timeout_seconds=0.7) as pool:
        (old,) = pool.host_pids
        for episode in range(6):
            await pool.reset(episode, episode, 7)
            await pool.step(episode, "a")
        waits = "wait 0.1" if name == WAITING else "sleep 0.1"
        under_way = [asyncio.create_task(pool.step(episode, waits)) for episode in (1, 2)]
        with pytest.raises(EnvironmentFailed) as raised:
            await pool.step(0, text)
        assert raised.value.reason == "timeout"
        assert not raised.value.by_infrastructure
        assert "user_environments.py" in raised.value.detail
        for episode, step in zip((1, 2), under_way, strict=True):
            assert await step == expected(episode, 7, ["a", waits])[-1]
        for episode in range(3, 6):
            assert await pool.step(episode, "b") == expected(episode, 7, ["a", "b"])[-1]
        cancelled = text == "wait 1000"
        assert (pool.host_restarts == 0) == cancelled
        assert alive(old) == cancelled


async def test_what_cannot_be_replayed_is_lost() -> None:
    """Others of a host that a call over its deadline has cost; one cannot be rebuilt in time."""
    async with running(f"{USER}:Unseeded", step_timeout_seconds=0.4) as pool:
        await pool.reset(1, 1, 7)
        await pool.step(1, "a")
        await pool.reset(2, 2, 7)
        with pytest.raises(EnvironmentFailed, match="timeout"):
            await pool.step(2, "sleep 1000")
        with pytest.raises(EnvironmentFailed, match="not_deterministic") as raised:
            await pool.step(1, "b")
        assert raised.value.by_infrastructure
        await pool.reset(1, 1, 7)
        await pool.step(1, "a")


async def test_a_replay_over_its_deadline_is_lost(tmp_path: Path) -> None:
    async with running(COUNTING, step_timeout_seconds=0.4) as pool:
        await pool.reset(1, 1, 7)
        await pool.step(1, f"once {tmp_path / 'played'}")
        await pool.reset(2, 2, 7)
        await pool.step(2, "a")
        os.kill(pool.host_pids[0], signal.SIGKILL)
        with pytest.raises(EnvironmentFailed, match="replay failed") as raised:
            await pool.step(1, "b")
        assert raised.value.reason == "lost"
        assert raised.value.by_infrastructure
        assert await pool.step(2, "b") == expected(2, 7, ["a", "b"])[-1]


async def test_a_host_that_dies_in_every_replay_gives_its_episodes_up(tmp_path: Path) -> None:
    async with running(COUNTING) as pool:
        await pool.reset(1, 1, 7)
        await pool.step(1, f"die_again {tmp_path / 'played'}")
        os.kill(pool.host_pids[0], signal.SIGKILL)
        with pytest.raises(EnvironmentFailed, match="lost as it was replayed") as raised:
            await pool.step(1, "b")
        assert raised.value.by_infrastructure
        await pool.reset(1, 1, 7)
        assert await pool.step(1, "a") == expected(1, 7, ["a"])[-1]
