"""Groups of agents, and of environments that ask for opponents, while the engine is away at times
and comes back with other weights."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from earl_core.rollout.engines.engine import Completion, GenerationRequest
from earl_core.rollout.engines.interruptible import InterruptibleEngine
from earl_core.rollout.engines.torch_engine import TorchEngine
from earl_core.rollout.rollout_worker import RolloutWorker
from tests.rollout import test_worker
from tests.rollout.chat_models import tiny_model
from tests.rollout.test_group_worker import GROUPS, given, parked, played, rows, sampled
from tests.rollout.test_worker import Setting

AWAY_SECONDS = 9.0
CALL_SECONDS, EPISODE_SECONDS = 7.0, 7.5
GAME = {"style": "compact", "opponent": "policy", "illegal_action": "retry", "max_retries": 3}
OPPOSED = {"name": "tic_tac_toe", "options": GAME, "step_timeout_seconds": EPISODE_SECONDS}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("agents") / "model")


@pytest.fixture
def setting(tmp_path: Path, model: Path) -> Setting:
    setting = Setting(tmp_path, model)
    setting.config["environment"] = {
        "agent": "tests.rollout.agents:talking",
        "call_timeout_seconds": CALL_SECONDS,
        "episode_timeout_seconds": EPISODE_SECONDS,
    }
    setting.config["rollout"] |= {"max_tokens_per_turn": 20, "max_turns": 4}
    setting.config["schedule"] = {"staleness": 1, "mode": "stream"}
    setting.config["algorithm"] = {"importance_correction": {}}
    return setting


async def interrupted(
    worker: RolloutWorker, setting: Setting, slices: int = 2
) -> tuple[list[Any], float]:
    """All groups, whose engine is away amid their answers, or before anybody has asked for one, and
    then plays another version; and the seconds without those."""
    began = time.monotonic()
    await worker.load(setting.weights(0))
    await worker.admit(given())
    found = await played(worker, slices)
    await worker.park()
    await asyncio.sleep(AWAY_SECONDS)
    await worker.load(setting.weights(1))
    found += await played(worker)
    return found, time.monotonic() - began - AWAY_SECONDS


def test_requests_of_agents_wait_for_an_engine_that_is_away(setting: Setting) -> None:
    """Longer than any of their limits allows, on one connection: their clients ask once."""

    async def work() -> Any:
        worker = setting.worker()
        try:
            return await interrupted(worker, setting)
        finally:
            await worker.close()

    groups, seconds = asyncio.run(work())
    assert sorted(each["group"] for each in groups) == [*GROUPS]
    found = rows(setting, groups)
    assert len(found) == 2 * len(GROUPS), "an episode is more than one row, or has failed"
    for each in groups:
        load = each["tally"]["load"]
        assert load["calls_timed_out"] == load["episodes_retried"] == each["tally"]["failed"] == 0
        assert load["generation_wait"] < 2 * seconds, "waits for the learner are counted"
        assert each["versions"] == [0, 1]
    switched = 0
    for row in found.values():
        assert row["turns"] == 3
        versions = sampled(row, "token_versions")
        assert versions == sorted(versions)
        assert set(versions) <= {0, 1}
        pairs = zip(row["policy_version_first"], row["policy_version_last"], strict=True)
        switched += any(first != last for first, last in pairs)
        assert row["opponent_versions"] == []
    assert switched, "no answer was open while the engine was away"


@pytest.mark.slow
def test_agents_that_begin_while_the_engine_is_away_wait_for_it(setting: Setting) -> None:
    async def work() -> Any:
        worker = setting.worker()
        try:
            return await interrupted(worker, setting, 0)
        finally:
            await worker.close()

    groups, _ = asyncio.run(work())
    assert [each["tally"]["failed"] for each in groups] == [0] * len(GROUPS)
    assert [each["tally"]["load"]["calls_timed_out"] for each in groups] == [0] * len(GROUPS)


def test_an_evaluation_is_played_while_agents_hold_all_threads(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stand still in them, because the engine is not theirs meanwhile."""
    setting.config["environment"]["agent"] = "tests.rollout.agents:in_a_thread"
    # As many as episodes are in play, so that each has a thread, and nobody else.
    few = {**test_worker.DEPLOYMENT, "max_running_requests": 2 * len(GROUPS)}
    monkeypatch.setattr(test_worker, "DEPLOYMENT", few)

    async def work() -> Any:
        worker = setting.worker()
        try:
            await worker.load(setting.weights(0))
            await worker.admit(given())
            await worker.finished(0.0, 1)
            evaluating = worker.evaluate(2, weights=setting.weights(0))
            tally = (await asyncio.wait_for(evaluating, 200))["tally"]
            await worker.load(setting.weights(1))
            return tally, await played(worker)
        finally:
            await worker.close()

    tally, groups = asyncio.run(work())
    assert (tally["episodes"], tally["failed"]) == (2, 0)
    assert sorted(each["group"] for each in groups) == [*GROUPS]
    assert [each["tally"]["failed"] for each in groups] == [0] * len(GROUPS)


def test_agents_that_hang_are_found_where_the_engine_is_there(setting: Setting) -> None:
    setting.config["environment"]["agent"] = "tests.rollout.agents:unreliable"
    setting.config["environment"]["options"] = {"faults": {"1": "hangs"}}

    async def work() -> Any:
        worker = setting.worker()
        try:
            await worker.load(setting.weights(0))
            await worker.admit(given())
            found: list[Any] = []
            while len(found) < len(GROUPS):
                found += (await worker.finished(0.2))["groups"]
            return found
        finally:
            await worker.close()

    tallies = {each["group"]: each["tally"] for each in asyncio.run(work())}
    assert [tallies[group]["failed"] for group in GROUPS] == [0, 2, 0]


def test_agents_are_played_anew_after_a_stop_and_said_to_be(setting: Setting) -> None:
    """Their file says that they had begun; a group of which nobody has asked anything has none."""

    async def work() -> Any:
        worker = setting.worker()
        try:
            await worker.load(setting.weights(0))
            await worker.admit(given()[:2])
            await played(worker, 2)
            await worker.park()
            await worker.admit(given()[2:])
        finally:
            await worker.close()
        files = [parked(setting).read(group) for group in GROUPS]
        worker = setting.worker()
        try:
            await worker.load(setting.weights(1))
            resumed = (await worker.admit(given(0, 1)))["resumed"]
            return files, resumed, await played(worker)
        finally:
            await worker.close()

    files, resumed, groups = asyncio.run(work())
    assert [None if each is None else each.episodes for each in files] == [None] * 3
    assert [each is None for each in files] == [False, False, True]
    assert resumed == []
    assert {each["group"]: each["versions"] for each in groups} == {group: [1] for group in GROUPS}
    assert len(rows(setting, groups)) == 2 * len(GROUPS)


def test_the_versions_that_answer_as_the_opponent_are_recorded(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the engine is asked: its sequences below 0 are those of opponents."""
    setting.config["environment"] = OPPOSED
    asked: defaultdict[int, set[int]] = defaultdict(set)

    async def generate(
        engine: TorchEngine, requests: Sequence[GenerationRequest]
    ) -> list[Completion]:
        answers = await generating(engine, requests)
        for request, answer in zip(requests, answers, strict=True):
            if request.sequence_id < 0:
                assert engine.policy_version is not None
                assert len(answer.tokens) > len(request.sampled)
                asked[(-2 - request.sequence_id) // 2 // 4096].add(engine.policy_version)
        return answers

    generating = TorchEngine.generate
    monkeypatch.setattr(TorchEngine, "generate", generate)

    async def work() -> Any:
        worker = setting.worker()
        try:
            return await interrupted(worker, setting)
        finally:
            await worker.close()

    groups, seconds = asyncio.run(work())
    found = rows(setting, groups)
    assert len(found) == 2 * len(GROUPS)
    for episode, row in found.items():
        assert row["opponent_versions"] == sorted(asked[episode])
    assert {0, 1} <= set().union(*asked.values())
    for each in groups:
        own = [row for row in found.values() if row["group_id"] == each["group"]]
        named = {v for row in own for v in (*row["token_versions"], *row["opponent_versions"])}
        assert each["versions"] == sorted(named - {-1})
        load = each["tally"]["load"]
        assert each["tally"]["failed"] == load["episodes_retried"] == 0
        assert load["environment_wait"] < 2 * seconds, "waits for the learner are counted"


class InParts:
    """An engine that tells two tokens of five, and is then asked to stop with three of them."""

    policy_version = 0

    def __init__(self) -> None:
        self._cancelled = asyncio.Event()

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        (request,) = requests
        assert request.on_tokens is not None
        if not request.sampled:
            request.on_tokens([1, 2])
            await self._cancelled.wait()
            return [answer_of([1, 2, 3], "cancelled")]
        request.on_tokens([4])
        return [answer_of([1, 2, 3, 4, 5], "stop")]

    async def cancel(self, sequence_ids: Sequence[int]) -> None:
        self._cancelled.set()


def answer_of(tokens: list[int], reason: Any) -> Completion:
    return Completion(tokens, [0.0] * len(tokens), reason, [])


def test_an_answer_that_is_told_as_it_grows_has_no_gap_where_it_was_interrupted() -> None:
    told: list[int] = []

    async def work() -> Completion:
        engine = InterruptibleEngine(InParts())  # type: ignore[arg-type]
        request = GenerationRequest(1, [9], 5, 1.0, 0, on_tokens=told.extend)
        answering = asyncio.create_task(engine.generate([request]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await engine.hold()
        engine.go_on()
        return (await answering)[0]

    assert asyncio.run(work()).tokens == [1, 2, 3, 4, 5]
    assert told == [1, 2, 3, 4]
