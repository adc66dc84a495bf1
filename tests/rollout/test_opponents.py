"""The policy as its own opponent: who asks for it gets answers that nobody is trained on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from earl_core.config import RunConfig
from earl_core.config.environment import EnvironmentConfig, SuiteConfig
from earl_core.environments.hosting.check import check_environments
from earl_core.environments.hosting.pool import EnvironmentPool
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.engines.engine import Completion, GenerationRequest
from earl_core.rollout.engines.torch_engine import TorchEngine
from earl_core.rollout.gateway.opponents import play_against_policy
from earl_core.rollout.rollout_load import LoadMeter, RolloutLoad
from earl_core.rollout.rollout_stats import RolloutStats, shape_metrics
from earl_core.system.errors import ConfigError
from earl_core.trajectory.samples import Episode
from tests.experience.test_turns_in_time import of_episodes
from tests.rollout.asking import HELLO, STOP, Asking, answering, asked, limits, specs
from tests.rollout.chat_models import CHATML, char_tokenizer, tiny_model
from tests.rollout.scripted import SayingEngine
from tests.rollout.test_agent_loop import check_columns

CHAT = ChatTokenizer(char_tokenizer(CHATML))
GAME = {"style": "compact", "opponent": "policy"}
USER = "tests.rollout.environments"


async def against_policy(
    engine: Any,
    name: str,
    options: dict[str, Any],
    count: int,
    *,
    hosts: int = 1,
    both: bool = False,
    **settings: Any,
) -> tuple[list[Episode], LoadMeter]:
    pool = EnvironmentPool(name, options, hosts=hosts, step_timeout_seconds=20.0)
    await pool.start()
    assert pool.wants_policy
    meter = LoadMeter(count)
    try:
        found = await play_against_policy(
            engine, pool, CHAT, specs(count), limits(**settings), meter=meter, both=both
        )
    finally:
        await pool.stop()
    return found, meter


def test_the_opponents_answers_are_in_no_sample_and_count_for_no_budget_of_the_policy() -> None:
    async def scenario(asking: Asking) -> None:
        names = (await asking.http.get(f"{asking.url}/models")).json()["data"]
        assert [each["id"] for each in names] == ["policy", "opponent"]
        mine = {**HELLO, "model": "opponent"}
        for _ in range(8):
            assert (await asking.post(mine)).status_code == 200
        refused = await asking.post(mine)
        assert refused.status_code == 400
        assert "the opponent has had its 8 answers" in refused.json()["error"]["message"]
        ids = {"model": "opponent", "token_ids": [5, 6]}
        url = asking.url.removesuffix("/v1") + "/inference/v1/generate"
        assert (await asking.http.post(url, json=ids)).json()["error"]["code"] == "budget_spent"
        assert (await asking.post(HELLO)).status_code == 200
        held = asking.session.sequence_ids
        episode = asking.session.end(1.0, {})
        assert episode.finish_reason == "done"
        (sample,) = episode.samples
        assert (len(sample.turn_starts), sample.turn_rewards) == (1, [1.0])
        meter = asking.gateway._meter
        assert (meter.opponent_calls, meter.opponent_tokens) == (8, 24)
        assert meter.generated_tokens == 27
        # What the engine keeps goes with the session, that of either side.
        await asking.gateway.close(asking.session)
        assert len(set(held)) == len(held) == 9
        assert asking.engine.finished == held

    asked(scenario, max_turns=1)


def test_the_sides_draw_apart() -> None:
    seeds: list[list[int]] = []
    for _ in range(2):
        engine = answering(lockstep=False)

        async def scenario(asking: Asking) -> None:
            for model in ("policy", "opponent", "opponent"):
                await asking.post({**HELLO, "model": model})

        asked(scenario, engine)
        seeds.append([batch[0].seed for batch in engine.batches])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3


def test_a_session_without_a_trained_side_records_nothing() -> None:
    async def scenario(asking: Asking) -> None:
        session = asking.gateway.open(specs(2)[1], trained=False)
        headers = {"Authorization": f"Bearer {session.key}"}
        url = f"{asking.gateway.base_url(session)}/chat/completions"
        for model in ("policy", "opponent"):
            asking_for = {**HELLO, "model": model}
            reply = await asking.http.post(url, json=asking_for, headers=headers)
            assert reply.status_code == 200
        assert session.end(1.0, {}).samples == []

    asked(scenario)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def test_games_against_the_policy_repeat_bit_for_bit(model: Path) -> None:
    """Whoever is faster: with two hosts the requests of opponents come in another order."""

    async def run(hosts: int) -> tuple[list[Episode], LoadMeter]:
        engine = TorchEngine(model, dtype="float32", threads=1)
        await engine.start()
        try:
            return await against_policy(
                engine, "tic_tac_toe", GAME, 16, hosts=hosts, temperature=1.0
            )
        finally:
            await engine.stop()

    (first, meter), (second, _) = (asyncio.run(run(hosts)) for hosts in (1, 2))
    check_columns(first)
    for one, other in zip(first, second, strict=True):
        (mine,), (theirs,) = one.samples, other.samples
        assert mine == theirs
        assert one.info == other.info
        assert "opponent_illegal_answers" in one.info["metrics"]  # type: ignore[operator]
    trained = sum(episode.samples[0].trained_tokens for episode in first)
    assert trained == meter.generated_tokens - meter.opponent_tokens
    assert meter.opponent_calls >= 8, "in half of the games the opponent begins"
    assert meter.environment_wait >= 0.0


class Scripted(SayingEngine):
    """Plays the first free square, the opponent what `rival` makes of it."""

    def __init__(self, rival: Callable[[str], str] = str, **options: Any) -> None:
        super().__init__(lambda sequence, turn: [], **options)
        self._rival = rival

    def _answer(self, request: GenerationRequest) -> Completion:
        board = CHAT.text_of(request.tokens).split()[-2]
        move = next(letter for letter in board if letter.isdigit())
        said = move if request.sequence_id >= 0 else self._rival(move)
        return self._completion(request, [*CHAT.encode(said), STOP], "stop")


@pytest.mark.parametrize("lockstep", [True, False])
def test_both_sides_play_the_same_game(lockstep: bool) -> None:
    """Square after square, X has 3, 5 and 7 then, whoever it is."""
    engine = Scripted(lockstep=lockstep)
    episodes, meter = asyncio.run(against_policy(engine, "tic_tac_toe", GAME, 6))
    assert [e.info["outcome"] for e in episodes] == ["win", "win", "loss", "loss", "win", "win"]
    assert [episode.turns for episode in episodes] == [4, 4, 3, 3, 4, 4]
    sizes = [len(batch) for batch in engine.batches]
    # Two openings; then the policy and its opponents in turn; the end of those that moved first.
    assert sizes == ([2, 6, 6, 6, 6, 6, 6, 4] if lockstep else [1] * 42)
    assert meter.opponent_calls == 20
    for episode in episodes:
        (sample,) = episode.samples
        assert sample.trained_tokens == 2 * episode.turns
        assert episode.info["metrics"]["opponent_illegal_answers"] == 0  # type: ignore[index]


@pytest.mark.parametrize("lockstep", [True, False])
def test_both_sides_are_trained_each_by_its_own_reward(tmp_path: Path, lockstep: bool) -> None:
    """The opponent's conversation is a sample of the episode, which is otherwise what it was."""
    alone, _ = asyncio.run(against_policy(Scripted(lockstep=lockstep), "tic_tac_toe", GAME, 8))
    engine = Scripted(lockstep=lockstep)
    episodes, _ = asyncio.run(against_policy(engine, "tic_tac_toe", GAME, 8, both=True))
    check_columns(episodes)
    shapes = [shape_metrics(RolloutStats.of(each, RolloutLoad())) for each in (episodes, alone)]
    assert shapes[0] == shapes[1]
    assert (shapes[0]["tokens_per_turn"], shapes[0]["new_sample_share"]) == (2.0, 0.0)
    flipped = {"win": -1.0, "loss": 1.0}
    for one, other in zip(episodes, alone, strict=True):
        mine, theirs = one.samples
        assert mine == other.samples[0]
        assert (one.total_reward, one.turns) == (other.total_reward, other.turns)
        assert theirs.role == "opponent"
        assert theirs.turn_rewards[-1] == flipped[str(one.info["outcome"])]
        assert not any(theirs.turn_rewards[:-1])
        assert theirs.trained_tokens == 2 * len(theirs.turn_starts)
        assert not set(mine.turn_numbers) & set(theirs.turn_numbers)
    # In each group of two both have won, or both have lost: another end for two of them.
    episodes[0].samples[1].turn_rewards[-1] = 0.5
    episodes[2].samples[0].turn_rewards[-1] = 0.25
    found, _ = of_episodes(tmp_path, episodes, "dr_grpo")
    sides = [[episode.samples[at].turn_rewards[-1] for episode in episodes] for at in (0, 1)]
    for at, rewards in enumerate(sides):
        groups = np.array(rewards).reshape(-1, 2)
        expected = (groups - groups.mean(axis=1, keepdims=True)).reshape(-1)
        assert np.abs(expected).max() > 0.3
        for tokens, value in zip(found[at::2], expected, strict=True):
            np.testing.assert_allclose(tokens, value, atol=1e-6)


def test_what_the_opponent_is_paid_is_told_by_the_environment() -> None:
    """Its illegal answers cost something; one that tells nothing fails its episodes."""
    game = {**GAME, "retry_reward": -0.25}
    engine = Scripted(lambda move: "x")
    episodes, _ = asyncio.run(against_policy(engine, "tic_tac_toe", game, 4, both=True))
    for episode in episodes:
        illegal = float(episode.info["metrics"]["opponent_illegal_answers"])  # type: ignore[index]
        outcome = {"win": -1.0, "loss": 1.0, "draw": 0.3}[str(episode.info["outcome"])]
        assert sum(episode.samples[1].turn_rewards) == pytest.approx(outcome - 0.25 * illegal)
    # Cut on the policy's side before the game's end nothing was told, which is no reward of 0.
    for turns, joined in ((1, 0), (3, 2)):
        engine = Scripted(lockstep=False)
        episodes, meter = asyncio.run(
            against_policy(engine, "tic_tac_toe", GAME, 4, both=True, max_turns=turns)
        )
        assert not any(episode.failed for episode in episodes)
        paid = [each for episode in episodes for each in episode.samples if each not in episode.own]
        assert len(paid) + meter.opponent_samples_unpaid == 4
        assert all(sum(sample.turn_rewards) for sample in paid)
        assert len(paid) == joined
    silent = {"dying": -1, "mark": ""}
    engine = Scripted(lambda move: "yes", lockstep=False)
    episodes, _ = asyncio.run(
        against_policy(engine, f"{USER}:Chatting", silent, 2, both=True, max_failed_share=1.0)
    )
    for episode in episodes:
        assert "no step told the opponent's reward" in str(episode.info["failure"])


def test_both_sides_need_an_opponent_that_is_the_policy() -> None:
    with pytest.raises(ValueError, match="an agent names the roles of its conversations"):
        EnvironmentConfig.model_validate({"agent": "a:b", "train": "all"})
    suite = {"name": "tic_tac_toe", "label": "s", "train": "all"}
    with pytest.raises(ValueError, match="held-out episodes train nobody"):
        SuiteConfig.model_validate(suite)
    raw = {
        "name": "run",
        "iterations": 1,
        "model": {"path": "nowhere"},
        "environment": {"name": "tic_tac_toe", "train": "all"},
        "rollout": {"prompts_per_iteration": 2, "group_size": 2, "max_turns": 5},
    }
    config = RunConfig.model_validate(raw)
    assert [each.train for each in config.evaluated.values()] == ["policy"]
    with pytest.raises(ConfigError, match="the environment does not ask the policy"):
        asyncio.run(check_environments(config))


def test_an_illegal_answer_of_the_opponent_is_replaced_and_told() -> None:
    engine = Scripted(lambda move: "x")
    episodes, _ = asyncio.run(against_policy(engine, "tic_tac_toe", GAME, 4))
    for episode in episodes:
        assert episode.info["metrics"]["opponent_illegal_answers"] >= 2  # type: ignore[index]
        assert episode.info["outcome"] in ("win", "draw", "loss", "illegal")
    later = [each for batch in engine.batches for each in batch if each.sequence_id < 0][-1]
    told = CHAT.text_of(later.tokens)
    assert "\n!" in told
    assert "\nx" in told, "its own answers stay in its conversation"


def test_what_the_engine_raises_for_the_opponent_ends_the_rollout() -> None:
    def broken(move: str) -> str:
        raise RuntimeError("the engine is broken")

    for lockstep in (True, False):
        engine = Scripted(broken, lockstep=lockstep)
        with pytest.raises(RuntimeError, match="the engine is broken"):
            asyncio.run(against_policy(engine, "tic_tac_toe", GAME, 4))


def test_an_environment_of_the_users_own_asks_the_policy(tmp_path: Path) -> None:
    """Its host dies once: what nobody can replay is played anew, in other sessions."""
    options = {"dying": 1, "mark": str(tmp_path / "died")}
    engine = Scripted(lambda move: "yes", lockstep=False)
    episodes, meter = asyncio.run(against_policy(engine, f"{USER}:Chatting", options, 6))
    assert [episode.info["outcome"] for episode in episodes] == ["yes yes"] * 6
    assert meter.episodes_retried >= 2


def test_a_refused_opponent_costs_its_episode() -> None:
    settings = {"max_turns": 1, "max_failed_share": 1.0}
    options = {"dying": -1, "mark": "", "questions": 9}
    engine = Scripted(lambda move: "yes")
    episodes, _ = asyncio.run(against_policy(engine, f"{USER}:Chatting", options, 2, **settings))
    assert {episode.finish_reason for episode in episodes} == {"environment_error"}
    assert "the opponent has had its 8 answers" in str(episodes[0].info["failure"])
