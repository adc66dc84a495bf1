"""Groups of an engine that is lost: it cannot even be asked to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, cast

import pytest

from earl_core.rollout.agent_loop import play
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.engines.engine import Completion, Engine, GenerationRequest
from earl_core.rollout.episode_player import PlaySettings
from earl_core.rollout.errors import EngineLost
from earl_core.rollout.group_player import GroupPlayer
from earl_core.rollout.group_record import GroupRecord
from earl_core.trajectory.samples import EpisodeSpec
from tests.rollout.chat_models import CHATML, char_tokenizer
from tests.rollout.scripted import ScriptedEngine, ScriptedEnvironments

CHAT = ChatTokenizer(char_tokenizer(CHATML))
SPECS = [EpisodeSpec(episode, 0, 0, episode) for episode in range(3)]
SETTINGS = PlaySettings(max_turns=9, max_live_episodes=3, max_failed_share=1.0)


class DyingEngine(ScriptedEngine):
    """Answers each episode once and then no more; whoever cancels that is told that it is dead."""

    def __init__(self) -> None:
        super().__init__(lambda sequence, turn: 3, CHAT.stop_token_ids[0], lockstep=False)
        self.silent = 0

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        if any(self._turns.get(each.sequence_id) for each in requests):
            self.silent += 1
            await asyncio.Event().wait()
        return await super().generate(requests)

    async def cancel(self, sequence_ids: Collection[int]) -> None:
        raise EngineLost("it died")


def player_of(engine: Any, pool: ScriptedEnvironments) -> GroupPlayer:
    playing = partial(play, pool=pool, chat=CHAT)
    return GroupPlayer(cast(Engine, engine), playing, SETTINGS, 60.0, lambda episodes: None)


def test_what_a_lost_engine_has_played_goes_on_and_nothing_of_it_is_left() -> None:
    pool, second = ScriptedEnvironments(lambda episode: 2), ScriptedEnvironments(lambda episode: 2)
    engine = ScriptedEngine(lambda sequence, turn: 5, CHAT.stop_token_ids[0], lockstep=False)

    async def work() -> tuple[GroupRecord, Any]:
        dying = DyingEngine()
        lost = player_of(dying, pool)
        lost.admit(0, SPECS)
        while dying.silent < len(SPECS):
            assert await lost.finished(0.01) == []
        left = await lost.unfinished()
        with pytest.raises(EngineLost, match="it died"):
            await lost.close()
        assert len(asyncio.all_tasks()) == 1, "something goes on"
        assert lost.playing == []
        other = player_of(engine, second)
        record = GroupRecord.load(left[0].dump())
        other.admit(0, SPECS, record)
        (found,) = await other.finished(10.0)
        await other.close()
        return record, found

    record, found = asyncio.run(work())
    assert pool.open == second.open == 0
    # The first answers are those of the engine that was lost.
    assert [len(each) for each in engine.batches] == [1] * len(SPECS)
    for episode in found.episodes:
        (sample,) = episode.samples
        assert sum(sample.loss_mask) == 4 + 6
        assert episode.total_reward == 1.0
        known = record[episode.episode_id]
        assert known is not None
        assert len(known.turns) == 2


def test_an_episode_that_its_environment_has_failed_begins_again_elsewhere() -> None:
    """It may have been mended meanwhile."""
    broken = ScriptedEnvironments(lambda episode: 2, failing={1: "step"})
    mended = ScriptedEnvironments(lambda episode: 2)
    engine = ScriptedEngine(lambda sequence, turn: 5, CHAT.stop_token_ids[0], lockstep=False)

    async def work() -> tuple[list[bool], Any]:
        dying = DyingEngine()
        lost = player_of(dying, broken)
        lost.admit(0, SPECS)
        while dying.silent < 2 or 1 not in broken.closed:
            assert await lost.finished(0.01) == []
        record = GroupRecord.load((await lost.unfinished())[0].dump())
        with pytest.raises(EngineLost, match="it died"):
            await lost.close()
        begun = [bool(each and each.turns) for each in map(record.__getitem__, range(3))]
        other = player_of(engine, mended)
        other.admit(0, SPECS, record)
        (found,) = await other.finished(10.0)
        await other.close()
        return begun, found

    begun, found = asyncio.run(work())
    assert begun == [True, False, True]
    assert [episode.total_reward for episode in found.episodes] == [1.0] * 3
    # Two answers of the one, and a second one of the others.
    assert sum(len(each) for each in engine.batches) == 4
