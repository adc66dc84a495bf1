"""The loop on a real engine: a tiny random model plays real games."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from earl_core.environments.base import Environment, Message, StepResult
from earl_core.environments.registry import create
from earl_core.rollout.agent_loop import play
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.engines.torch_engine import TorchEngine
from earl_core.rollout.episode_player import PlaySettings
from earl_core.trajectory.samples import Episode, EpisodeSpec, rollout_rows
from earl_core.trajectory.schema import ROLLOUT_SCHEMA
from tests.published import published
from tests.rollout.chat_models import CHATML, char_tokenizer, tiny_model
from tests.rollout.test_agent_loop import check_columns

GAME = {"style": "compact", "illegal_action": "retry", "max_retries": 5}
TEMPERATURE = 0.7


class LocalEnvironments:
    """Environments in this process."""

    tools = ()

    def __init__(self) -> None:
        self._games: dict[int, Environment] = {}

    async def reset(self, episode_id: int, prompt: int, seed: int) -> list[Message]:
        self._games[episode_id] = create("tic_tac_toe", GAME)
        return self._games[episode_id].reset(prompt, seed)

    async def step(self, episode_id: int, text: str) -> StepResult:
        return self._games[episode_id].step(text)

    async def close(self, episode_id: int) -> None:
        self._games.pop(episode_id).close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def play_games(model: Path, count: int, **options: Any) -> list[Episode]:
    chat = ChatTokenizer(char_tokenizer(CHATML))
    engine = TorchEngine(model, dtype="float32", threads=1)
    specs = [EpisodeSpec(i, i // 2, i // 2, seed=7 + i) for i in range(count)]
    defaults = {"max_turns": 6, "max_tokens_per_turn": 3, "temperature": TEMPERATURE}
    limits = PlaySettings(**(defaults | options))

    async def run() -> list[Episode]:
        await engine.start()
        try:
            return await play(engine, LocalEnvironments(), chat, specs, limits)
        finally:
            await engine.stop()

    return asyncio.run(run())


@pytest.fixture(scope="module")
def episodes(model: Path) -> list[Episode]:
    return play_games(model, 12)


def test_two_runs_are_equal_bit_for_bit(model: Path, episodes: list[Episode]) -> None:
    first, checksum = published(rollout_rows(episodes), ROLLOUT_SCHEMA)
    second, again = published(rollout_rows(play_games(model, 12)), ROLLOUT_SCHEMA)
    assert first.equals(second)
    assert checksum == again


def test_samples_are_valid_and_games_differ(episodes: list[Episode]) -> None:
    check_columns(episodes)
    assert all(len(episode.samples) == 1 for episode in episodes)
    assert len({tuple(episode.samples[0].tokens) for episode in episodes}) == len(episodes)
    assert max(episode.turns for episode in episodes) > 1


def test_logprobs_are_those_of_the_sampled_distribution(
    model: Path, episodes: list[Episode]
) -> None:
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for episode in episodes:
        sample = episode.samples[0]
        tokens = torch.tensor(sample.tokens)
        with torch.no_grad():
            logits = network(tokens[None]).logits[0, :-1] / TEMPERATURE
        expected = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        mask = torch.tensor(sample.loss_mask[1:]).bool()
        recorded = torch.tensor(sample.rollout_logprobs[1:])
        assert torch.allclose(recorded[mask], expected[mask], atol=1e-4)


def test_the_context_ends_an_episode_without_a_crash(tmp_path: Path) -> None:
    short = tiny_model(tmp_path / "short", positions=96)
    found = play_games(short, 4, max_tokens_per_turn=None)
    check_columns(found)
    assert "model_context" in {episode.finish_reason for episode in found}
    assert max(episode.context_tokens for episode in found) <= 96
