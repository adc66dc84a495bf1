"""Agents that know OpenAI's API only, on a real engine, from processes of their own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from earl_core.config.environment import EnvironmentConfig
from earl_core.environments.hosting.pool import EnvironmentPool
from earl_core.environments.registry import check
from earl_core.rollout.agent_loop import play
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.engines.torch_engine import TorchEngine
from earl_core.rollout.environment_pools import EnvironmentPools
from earl_core.rollout.episode_player import PlaySettings
from earl_core.rollout.errors import ContextOverflow, RolloutFailed
from earl_core.rollout.gateway.play import play_agents
from earl_core.rollout.rollout_load import LoadMeter
from earl_core.system.errors import ConfigError
from earl_core.trajectory.samples import Episode, EpisodeSpec
from tests.rollout.asking import answering, limits, on_torch, specs
from tests.rollout.chat_models import CHATML, char_tokenizer, tiny_model
from tests.rollout.test_agent_loop import check_columns
from tests.rollout.test_play_with_torch import GAME, LocalEnvironments

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


async def played(
    engine: Any,
    agent: str,
    count: int,
    settings: PlaySettings,
    options: dict[str, Any] | None = None,
    seconds: float = 30.0,
) -> tuple[list[Episode], LoadMeter, EnvironmentPool]:
    chat = ChatTokenizer(char_tokenizer(CHATML))
    built_in = agent in ("program", "task_directories")
    name = f"agent:{agent}" if built_in else f"agent:tests.rollout.agents:{agent}"
    pool = EnvironmentPool(name, options, step_timeout_seconds=seconds)
    await pool.start()
    meter = LoadMeter(count)
    try:
        found = await play_agents(engine, pool, chat, specs(count), settings, meter=meter)
    finally:
        await pool.stop()
    return found, meter, pool


def test_greedy_games_are_those_of_the_agent_loop(model: Path) -> None:
    """Tokens, masks, log-probs, rewards and outcomes."""
    settings = limits(temperature=0.0)

    async def both(engine: TorchEngine) -> Any:
        agents, _, _ = await played(engine, "tic_tac_toe", 12, settings, {"game": GAME})
        chat = ChatTokenizer(char_tokenizer(CHATML))
        return agents, await play(engine, LocalEnvironments(), chat, specs(12), settings)

    agents, builtin = asyncio.run(on_torch(model, both))
    check_columns(agents)
    assert max(episode.turns for episode in agents) > 1
    for one, other in zip(agents, builtin, strict=True):
        (mine,), (theirs,) = one.samples, other.samples
        # The loop knows of its last turn, an agent asks once more.
        assert one.finish_reason == other.finish_reason
        assert one.info == other.info
        assert one.total_reward == pytest.approx(other.total_reward)
        assert mine.tokens == theirs.tokens
        assert mine.loss_mask == theirs.loss_mask
        assert mine.turn_starts == theirs.turn_starts
        assert mine.rollout_logprobs == pytest.approx(theirs.rollout_logprobs, abs=1e-5)


def test_logprobs_are_those_of_a_teacher_forced_forward(model: Path) -> None:
    settings = limits(temperature=TEMPERATURE)
    game = {"game": GAME}
    episodes, meter, _ = asyncio.run(
        on_torch(model, lambda engine: played(engine, "tic_tac_toe", 12, settings, game))
    )
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trained = 0
    for episode in episodes:
        (sample,) = episode.samples
        tokens = torch.tensor(sample.tokens)
        with torch.no_grad():
            logits = network(tokens[None]).logits[0, :-1] / TEMPERATURE
        expected = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        mask = torch.tensor(sample.loss_mask[1:]).bool()
        trained += int(mask.sum())
        recorded = torch.tensor(sample.rollout_logprobs[1:])
        assert torch.allclose(recorded[mask], expected[mask], atol=1e-4)
    assert trained == meter.generated_tokens > 100
    assert meter.episodes_done == 12
    assert meter.running_max > 6, "waiting requests are answered together"


def test_draws_depend_on_episode_conversation_and_call_alone(model: Path) -> None:
    settings = limits(temperature=1.0)

    async def alone_and_together(engine: TorchEngine) -> Any:
        found = [await played(engine, "two_at_once", 6, settings) for _ in range(2)]
        return [episodes for episodes, _, _ in found]

    first, second = asyncio.run(on_torch(model, alone_and_together))
    for one, other in zip(first, second, strict=True):
        streams = [sorted(sample.tokens for sample in each.samples) for each in (one, other)]
        assert streams[0] == streams[1]
        assert len({tuple(tokens) for tokens in streams[0]}) == 3


def test_conversations_of_a_session_are_samples_of_their_own() -> None:
    episodes, meter, _ = asyncio.run(played(answering(lockstep=False), "two_at_once", 4, limits()))
    check_columns(episodes)
    for episode in episodes:
        assert sorted(len(sample.turn_starts) for sample in episode.samples) == [1, 3, 3]
        assert episode.total_reward == 1.0
    assert meter.generated_tokens == 4 * 7 * 3


def test_a_plain_function_is_an_agent_too() -> None:
    for name, reward in (("in_a_thread", 2.0), ("undecided", 1.0)):
        episodes, _, _ = asyncio.run(played(answering(), name, 6, limits()))
        assert [episode.total_reward for episode in episodes] == [reward] * 6


FAULTS = {
    "0": "raises",
    "1": "nothing",
    "2": "no reward",
    "3": "silent",
    "4": "hangs",
    "5": "greedy",
    "6": "content",
    "7": "hangs at once",
}


def test_what_an_agent_does_wrong_costs_its_own_episode() -> None:
    settings = limits(max_failed_share=1.0)
    options = {"faults": FAULTS}
    found, meter, pool = asyncio.run(
        played(answering(), "unreliable", 18, settings, options, seconds=8.0)
    )
    reasons = [episode.finish_reason for episode in found[::2]]
    assert reasons[:4] == ["environment_error"] * 4
    assert reasons[4:7] == ["environment_timeout", "max_turns", "max_turns"]
    assert reasons[7:] == ["environment_timeout", "done"]
    details = [str(episode.info.get("failure")) for episode in found[::2]]
    assert "this agent is broken" in details[0]
    assert "reward must be a finite number" in details[1]
    assert "dict without a reward" in details[2]
    assert "without a single answer" in details[3]
    assert "asyncio.sleep(3600)" in details[4]
    rewards = [found[number].total_reward for number in (10, 12, 16)]
    assert rewards == [0.0, 0.5, 1.0]
    assert found[-1].info == {"outcome": "win", "metrics": {"index": 8}}
    assert meter.episodes_failed == 12
    assert pool.host_restarts == 0, "one that waits costs no other agent its process"


@pytest.mark.parametrize("fault", ["dies", "blocks"])
def test_agents_of_a_lost_process_are_played_anew(fault: str) -> None:
    settings = limits(max_failed_share=0.0)
    once: dict[str, Any] = {"faults": {"0": fault}}
    with pytest.raises(RolloutFailed, match="of 4 episodes failed"):
        asyncio.run(played(answering(), "unreliable", 4, settings, once, seconds=1.0))


def test_too_many_failures_end_the_rollout() -> None:
    options = {"faults": {str(number): "raises" for number in range(8)}}
    with pytest.raises(RolloutFailed, match="this agent is broken"):
        asyncio.run(played(answering(), "unreliable", 16, limits(), options))


def test_a_context_that_is_too_short_for_the_engine_alone_ends_the_rollout() -> None:
    engine = answering(max_model_len=24)
    with pytest.raises(ContextOverflow):
        asyncio.run(played(engine, "unreliable", 4, limits(positions=4096), {"faults": {}}))


def test_the_models_own_context_ends_an_episode() -> None:
    engine = answering(max_model_len=90)
    options = {"game": GAME}
    settings = limits(max_failed_share=1.0, positions=90)
    found, _, _ = asyncio.run(played(engine, "tic_tac_toe", 4, settings, options))
    assert {episode.finish_reason for episode in found} == {"model_context"}
    assert max(episode.context_tokens for episode in found) <= 90


def test_what_is_no_agent_is_refused_before_work_starts() -> None:
    with pytest.raises(ConfigError, match=r"is no function of \(task, base_url, api_key\)"):
        check("agent:tests.rollout.agents:client")
    with pytest.raises(ConfigError, match=r"no function of .*base_url"):
        check("agent:tests.rollout.agents:misnamed")
    with pytest.raises(ConfigError, match="no_such"):
        check("agent:tests.rollout.agents:no_such")


def test_agents_and_games_side_by_side_are_different_sequences(tmp_path: Path) -> None:
    """An agent has several in one episode: none may be another environment's."""
    engine = answering(lockstep=False)
    environments = {
        "agent": EnvironmentConfig(agent="tests.rollout.agents:two_at_once"),
        "game": EnvironmentConfig(name="tic_tac_toe"),
    }
    mixed = [
        EpisodeSpec(number, number, 0, 7, "game" if number else "agent") for number in range(4)
    ]

    async def run() -> list[Episode]:
        pools = EnvironmentPools(tmp_path / "rank.log", tmp_path / "environments.json")
        chat = ChatTokenizer(char_tokenizer(CHATML))
        try:
            return await pools.play(
                engine, chat, environments, mixed, limits(), LoadMeter(len(mixed))
            )
        finally:
            await pools.close()

    episodes = asyncio.run(run())
    assert [episode.failed for episode in episodes] == [False] * 4
    sequences = {request.sequence_id for batch in engine.batches for request in batch}
    assert len(sequences) == len(episodes[0].samples) + 3
    assert {number for number in sequences if number >= 0} == {1, 2, 3}
