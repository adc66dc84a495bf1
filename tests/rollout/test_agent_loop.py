from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earl_core.environments.base import EnvironmentFailed, Message, StepResult
from earl_core.rollout.agent_loop import play
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.episode_player import PlaySettings
from earl_core.rollout.errors import RolloutFailed
from earl_core.rollout.rollout_load import LoadMeter
from earl_core.rollout.rollout_stats import (
    RolloutStats,
    example,
    rollout_metrics,
    selector_statistics,
)
from earl_core.trajectory.samples import FAILED_REASONS, Episode, EpisodeSpec, rollout_rows
from earl_core.trajectory.schema import ROLLOUT_SCHEMA
from tests.published import published
from tests.rollout.chat_models import CHATML, DROPS_REASONING, MISTRAL, char_tokenizer
from tests.rollout.scripted import ScriptedEngine, ScriptedEnvironments

CHAT = ChatTokenizer(char_tokenizer(CHATML))
STOP = CHAT.stop_token_ids[0]
BOTH = pytest.mark.parametrize("lockstep", [True, False])


def specs_of(count: int) -> list[EpisodeSpec]:
    return [EpisodeSpec(i, i // 2, 100 + i // 2, seed=1000 + i) for i in range(count)]


def played(
    engine: Any, pool: Any, count: int, chat: ChatTokenizer = CHAT, **options: Any
) -> list[Episode]:
    given_settings = PlaySettings(**{"max_turns": 10, **options})
    return asyncio.run(play(engine, pool, chat, specs_of(count), given_settings))


@BOTH
def test_games_of_different_lengths(lockstep: bool) -> None:
    engine = ScriptedEngine(lambda i, _: i % 3 + 1, STOP, lockstep=lockstep)
    pool = ScriptedEnvironments(lambda i: i % 4 + 1)
    episodes = played(engine, pool, 9)
    assert [e.episode_id for e in episodes] == list(range(9))
    for episode in episodes:
        i = episode.episode_id
        assert (episode.finish_reason, episode.turns) == ("done", i % 4 + 1)
        (sample,) = episode.samples
        assert sample.trained_tokens == (i % 4 + 1) * (i % 3 + 2)
        assert sample.turn_rewards == [0.0] * (i % 4) + [1.0]
        assert sample.policy_version_first == sample.policy_version_last == [3] * episode.turns
        assert episode.info["outcome"] == "win"
        assert pool.seeds[i][0] == episode.prompt_id
    assert sorted(pool.closed) == sorted(engine.finished) == list(range(9))
    assert len({seed for _, seed in pool.seeds.values()}) == 9
    draws = [request.seed for batch in engine.batches for request in batch]
    assert len(set(draws)) == len(draws)


@BOTH
def test_each_request_extends_the_tokens_before_it(lockstep: bool) -> None:
    engine = ScriptedEngine(lambda i, t: t + 1, STOP, lockstep=lockstep)
    (episode,) = played(engine, ScriptedEnvironments(lambda i: 3), 1)
    requests = [request for batch in engine.batches for request in batch]
    tokens = episode.samples[0].tokens
    for request, following in itertools.pairwise(requests):
        assert following.tokens[: len(request.tokens)] == request.tokens
    for request, start in zip(requests[1:], episode.samples[0].turn_starts[1:], strict=True):
        assert request.tokens == tokens[: len(request.tokens)]
        assert len(request.tokens) > start
    assert all(request.stop_token_ids == CHAT.stop_token_ids for request in requests)


def test_lockstep_feeds_whole_batches() -> None:
    engine = ScriptedEngine(lambda i, _: 1, STOP)
    played(engine, ScriptedEnvironments(lambda i: i % 3 + 1), 6)
    assert [len(batch) for batch in engine.batches] == [6, 4, 2]


def test_lockstep_in_waves() -> None:
    engine = ScriptedEngine(lambda i, _: 1, STOP)
    pool = ScriptedEnvironments(lambda i: 2)
    played(engine, pool, 5, max_live_episodes=2)
    assert [len(batch) for batch in engine.batches] == [2, 2, 2, 2, 1, 1]
    assert pool.most_open == 2


def test_continuous_bounds_live_episodes_and_overlaps_them() -> None:
    engine = ScriptedEngine(lambda i, _: 1, STOP, lockstep=False)
    pool = ScriptedEnvironments(lambda i: 2)
    played(engine, pool, 20, max_live_episodes=7)
    assert engine.most_running == 7
    # An episode's environment is closed outside of its slot, so a next one may already be open.
    assert 7 <= pool.most_open <= 14


@BOTH
def test_budgets(lockstep: bool) -> None:
    def run(engine_options: dict[str, Any], **options: Any) -> Episode:
        engine = ScriptedEngine(lambda i, _: 5, STOP, lockstep=lockstep, **engine_options)
        return played(engine, ScriptedEnvironments(lambda i: 4), 1, **options)[0]

    episode = run({}, max_turns=2)
    assert (episode.finish_reason, episode.turns) == ("max_turns", 2)
    episode = run({}, max_tokens_per_turn=3)
    assert (episode.finish_reason, episode.turns) == ("done", 4)
    assert episode.samples[0].trained_tokens == 12
    episode = run({}, max_tokens_per_episode=8)
    assert (episode.finish_reason, episode.turns) == ("max_tokens", 2)
    assert episode.samples[0].trained_tokens == 8
    episode = run({}, max_tokens_per_turn=4, max_tokens_per_episode=8)
    assert (episode.finish_reason, episode.turns) == ("max_tokens", 2)
    first = len(CHAT.first_prompt([{"role": "user", "content": "start"}]))
    episode = run({"max_model_len": first + 2})
    assert (episode.finish_reason, episode.context_tokens) == ("model_context", first + 2)
    # Room for the first answer but not for the next observation.
    episode = run({"max_model_len": first + 10})
    assert (episode.finish_reason, episode.turns) == ("model_context", 1)
    assert len(episode.samples[0].turn_starts) == 1


@BOTH
def test_failed_episodes_are_kept_apart(lockstep: bool) -> None:
    engine = ScriptedEngine(lambda i, _: 1, STOP, lockstep=lockstep)
    pool = ScriptedEnvironments(lambda i: 2, failing={1: "reset", 4: "hang", 6: "step"})
    episodes = played(engine, pool, 10, max_failed_share=0.3)
    reasons = {e.episode_id: e.finish_reason for e in episodes if e.finish_reason != "done"}
    assert reasons == {1: "environment_error", 4: "environment_timeout", 6: "environment_error"}
    assert set(reasons.values()) <= FAILED_REASONS
    assert "no board" in str(episodes[1].info["failure"])
    assert sorted(pool.closed) == sorted(engine.finished) == list(range(10))


@BOTH
def test_messages_that_the_template_refuses_cost_their_episode(lockstep: bool) -> None:
    """Rows of a data set may order roles as this model's template does not; one is no reason to
    end the others."""

    class Odd(ScriptedEnvironments):
        async def reset(self, episode_id: int, prompt: int, seed: int) -> list[Message]:
            first = await super().reset(episode_id, prompt, seed)
            return [{"role": "system", "content": "x"}, *first] if episode_id == 3 else first

        async def step(self, episode_id: int, text: str) -> StepResult:
            result = await super().step(episode_id, text)
            odd: list[Message] = [{"role": "system", "content": "y"}]
            return replace(result, messages=odd) if episode_id in (5, 6) else result

    chat = ChatTokenizer(char_tokenizer(MISTRAL))
    engine = ScriptedEngine(lambda i, _: 1, chat.stop_token_ids[0], lockstep=lockstep)
    pool = Odd(lambda i: 1 if i == 6 else 2)
    episodes = played(engine, pool, 10, chat, max_failed_share=0.2)
    failed = {each.episode_id: each for each in episodes if each.failed}
    assert {number: each.finish_reason for number, each in failed.items()} == {
        3: "environment_error",
        5: "environment_error",
    }
    for each in failed.values():
        assert "only user and assistant roles are known" in str(each.info["failure"])
    assert [each.finish_reason for each in episodes if not each.failed] == ["done"] * 8
    assert sorted(pool.closed) == sorted(engine.finished) == list(range(10))
    with pytest.raises(RolloutFailed, match=r"episode 3 .*roles system, user: only user"):
        played(engine, Odd(lambda i: 2), 10, chat, max_failed_share=0.1)


@BOTH
def test_what_infrastructure_lost_is_played_anew_twice_at_most(lockstep: bool) -> None:
    class Losing(ScriptedEnvironments):
        async def step(self, episode_id: int, text: str) -> StepResult:
            if self._played[episode_id] == 1 and left.get(episode_id, 0):
                left[episode_id] -= 1
                raise EnvironmentFailed(episode_id, "lost", "its host burnt")
            return await super().step(episode_id, text)

    left = {1: 1, 4: 2, 6: 3}
    engine, meter = ScriptedEngine(lambda i, _: 1, STOP, lockstep=lockstep), LoadMeter(8)
    limits = PlaySettings(max_turns=10, max_failed_share=0.2)
    pool = Losing(lambda i: 3)
    episodes = asyncio.run(play(engine, pool, CHAT, specs_of(8), limits, meter=meter))
    undisturbed = played(
        ScriptedEngine(lambda i, _: 1, STOP, lockstep=lockstep),
        ScriptedEnvironments(lambda i: 3),
        8,
    )
    for episode, plain in zip(episodes, undisturbed, strict=True):
        if episode.episode_id != 6:
            assert (episode.finish_reason, episode.samples) == ("done", plain.samples)
    assert episodes[1].samples[0].texts[::2] == ["start", "next", "next", "over"]
    assert episodes[6].finish_reason == "environment_error"
    assert "its host burnt" in str(episodes[6].info["failure"])
    assert (meter.episodes_done, meter.episodes_failed) == (8, 1)
    assert rollout_metrics(RolloutStats.of(episodes, meter))["episodes_retried"] == 1 + 2 + 2
    assert sorted(pool.closed) == list(range(8))


@BOTH
def test_too_many_failures_end_the_rollout(lockstep: bool) -> None:
    engine = ScriptedEngine(lambda i, _: 1, STOP, lockstep=lockstep)
    pool = ScriptedEnvironments(lambda i: 50, failing={1: "reset", 4: "hang", 6: "step"})
    with pytest.raises(RolloutFailed, match=r"(?s)max_failed_share.*episode 1 .*no board") as error:
        played(engine, pool, 10, max_failed_share=0.2, max_turns=50)
    assert error.value.payload["failed"] == 3
    assert sorted(pool.closed) == list(range(10))
    assert sorted(set(engine.finished)) == list(range(10))


@BOTH
def test_a_prompt_larger_than_the_context_is_named(lockstep: bool) -> None:
    engine = ScriptedEngine(lambda i, _: 1, STOP, lockstep=lockstep, max_model_len=8)
    with pytest.raises(RolloutFailed, match=r"(?s)raise rollout\.max_model_len"):
        played(engine, ScriptedEnvironments(lambda i: 1), 4)


@BOTH
def test_an_engine_error_ends_the_rollout_and_frees_everything(lockstep: bool) -> None:
    class Broken(ScriptedEngine):
        async def generate(self, requests: Any) -> Any:
            if len(self.batches) == 3:
                raise OSError("lost")
            return await super().generate(requests)

    engine = Broken(lambda i, _: 1, STOP, lockstep=lockstep)
    pool = ScriptedEnvironments(lambda i: 9)
    with pytest.raises(OSError, match="lost"):
        played(engine, pool, 6)
    assert sorted(pool.closed) == list(range(6))
    assert pool.open == 0


@BOTH
def test_cancelling_the_task_frees_everything(lockstep: bool) -> None:
    engine = ScriptedEngine(lambda i, _: 1, STOP, lockstep=lockstep)
    pool = ScriptedEnvironments(lambda i: 10**6, seconds=0.001)

    async def run() -> None:
        limits = PlaySettings(max_turns=10**6)
        engine.max_model_len = 10**9
        task = asyncio.create_task(play(engine, pool, CHAT, specs_of(4), limits))  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert sorted(engine.cancelled) == sorted(pool.closed) == [0, 1, 2, 3]


def test_a_template_that_rewrites_answers_begins_new_samples() -> None:
    tokenizer = char_tokenizer(DROPS_REASONING)
    chat = ChatTokenizer(tokenizer)

    class Thinking(ScriptedEngine):
        def _answer(self, request: Any) -> Any:
            return self._completion(request, [*chat.encode("<think>hm</think>\n\nd"), STOP], "stop")

    engine = Thinking(lambda i, _: 1, STOP)
    (episode,) = played(engine, ScriptedEnvironments(lambda i: 3), 1, chat=chat)
    assert (len(episode.samples), episode.turns, episode.finish_reason) == (3, 3, "done")
    last = engine.batches[-1][0].tokens
    assert tokenizer.decode(last).count("assistant\nd<|im_end|>") == 2
    assert episode.samples[-1].tokens[: len(last)] == last
    assert engine.finished == [0, 0, 0]
    check_columns([episode])


@BOTH
def test_an_episode_over_its_time_is_asked_no_more(lockstep: bool) -> None:
    engine = ScriptedEngine(lambda i, _: 1, STOP, lockstep=lockstep)
    pool = ScriptedEnvironments(lambda i: 1000 if i % 2 else 1)
    # A second for each turn of the longest.
    options = {"clock": lambda: max(pool._played.values(), default=0), "episode_seconds": 50}
    episodes = played(engine, pool, 4, max_turns=1000, max_failed_share=1.0, **options)
    reasons = ["done", "environment_timeout"] * 2
    assert [episode.finish_reason for episode in episodes] == reasons
    assert "environment.episode_timeout_seconds" in str(episodes[1].info["failure"])
    assert sorted(pool.closed) == [0, 1, 2, 3]


def test_transcripts_and_numbers() -> None:
    engine = ScriptedEngine(lambda i, _: 1, STOP)
    pool = ScriptedEnvironments(lambda i: 2, failing={3: "hang"})
    seen: list[int] = []
    meter = LoadMeter(4, lambda progress: seen.append(progress["episodes_done"]))
    limits = PlaySettings(max_turns=9, max_failed_share=0.5)
    episodes = asyncio.run(
        play(engine, pool, CHAT, specs_of(4), limits, meter=meter)  # type: ignore[arg-type]
    )
    for episode in episodes[:3]:
        read = example(episode)
        assert [turn["observation"] for turn in read["turns"]] == ["start", "next"]
        assert [turn["reward"] for turn in read["turns"]] == [0.0, 1.0]
        assert all(turn["answer"] for turn in read["turns"])
        assert (read["closing"], read["outcome"]) == ("over", "win")
    assert seen == [1]
    kept = [e for e in episodes if not e.failed]
    tally = RolloutStats.of(episodes, meter)
    numbers = rollout_metrics(tally)
    assert numbers["episodes"] == 3
    assert numbers["episodes_failed"] == 1
    assert numbers["return/mean"] == 1.0
    assert numbers["return/std"] == 0.0
    assert numbers["outcome/win"] == 1.0
    assert "outcome/illegal" not in numbers, "its environment has none"
    assert numbers["finish/done"] == 1.0
    assert numbers["samples_per_episode"] == 1.0
    assert numbers["generated_tokens"] == 4 * 2 + 3 * 2
    assert numbers["context_by_turn/02"] == numbers["context/max"] == kept[0].context_tokens
    assert numbers["environment/moves"] == 2.0
    statistics = selector_statistics(tally)
    assert statistics["running_requests_max"] == 4
    assert statistics["live_tokens_max"] >= 3 * kept[0].context_tokens
    assert all(isinstance(value, float) for value in (*numbers.values(), *statistics.values()))


@settings(max_examples=40, deadline=None)
@given(
    lockstep=st.booleans(),
    lengths=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=5),
    turns=st.integers(1, 6),
    max_turns=st.integers(1, 5),
    turn_budget=st.none() | st.integers(1, 8),
    episode_budget=st.none() | st.integers(1, 20),
    context=st.integers(60, 200),
)
def test_any_lengths_and_budgets_keep_columns_consistent(
    lockstep: bool,
    lengths: list[list[int]],
    turns: int,
    max_turns: int,
    turn_budget: int | None,
    episode_budget: int | None,
    context: int,
) -> None:
    engine = ScriptedEngine(
        lambda i, t: lengths[i][t % len(lengths[i])],
        STOP,
        lockstep=lockstep,
        max_model_len=context,
    )
    episodes = played(
        engine,
        ScriptedEnvironments(lambda i: turns),
        len(lengths),
        max_turns=max_turns,
        max_tokens_per_turn=turn_budget,
        max_tokens_per_episode=episode_budget,
    )
    sampled: dict[int, int] = {}
    for batch in engine.batches:
        for request in batch:
            budgets = [b for b in (turn_budget, episode_budget) if b is not None]
            assert (request.max_tokens is None) == (not budgets)
            assert not budgets or 1 <= (request.max_tokens or 0) <= min(budgets)
            sampled[request.sequence_id] = sampled.get(request.sequence_id, 0) + 1
    for episode in episodes:
        assert episode.finish_reason in {"done", "max_turns", "max_tokens", "model_context"}
        assert episode.turns == sampled[episode.episode_id] <= max_turns
        assert episode.context_tokens <= context
        if episode_budget is not None:
            assert sum(s.trained_tokens for s in episode.samples) <= episode_budget
    check_columns(episodes)


def check_columns(episodes: list[Episode]) -> None:
    """Every sample is consistent, and the columns make a valid record batch."""
    for sample in (sample for episode in episodes for sample in episode.samples):
        length = len(sample.tokens)
        assert len(sample.loss_mask) == len(sample.rollout_logprobs) == length
        assert sample.trained_tokens == sum(logprob != 0 for logprob in sample.rollout_logprobs)
        turns = len(sample.turn_starts)
        assert len(sample.turn_rewards) == len(sample.policy_version_first) == turns
        assert len(sample.policy_version_last) == turns
        assert sample.turn_starts == sorted(sample.turn_starts)
        assert sample.turn_starts[0] == 0
        # Each turn begins with given tokens and has sampled ones after them.
        ends = [*sample.turn_starts[1:], length]
        for start, end in zip(sample.turn_starts, ends, strict=True):
            mask = sample.loss_mask[start:end]
            assert mask == sorted(mask)
            assert mask[-1] == 1
    batch, _ = published(rollout_rows(episodes), ROLLOUT_SCHEMA)
    assert batch.num_rows == sum(len(episode.samples) for episode in episodes)
