"""No episode is cut by the context that an engine was built for, and lack of memory is typed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from earl_core.cluster.errors import WorkerCallFailed
from earl_core.cluster.worker_group import WorkerGroup
from earl_core.rollout.agent_loop import play
from earl_core.rollout.engines.slot_cache import SlotCache
from earl_core.rollout.episode_player import PlaySettings
from earl_core.rollout.errors import ContextOverflow, RolloutFailed
from earl_core.rollout.rollout_worker import RolloutWorker
from earl_core.system.memory import OutOfMemory
from earl_core.trajectory.samples import Episode
from tests.rollout.chat_models import tiny_model
from tests.rollout.scripted import ScriptedEngine, ScriptedEnvironments
from tests.rollout.test_agent_loop import BOTH, CHAT, STOP, specs_of
from tests.rollout.test_worker import DEPLOYMENT, Setting

FIRST = len(CHAT.first_prompt([{"role": "user", "content": "start"}]))


def played(
    engine: ScriptedEngine, pool: ScriptedEnvironments, count: int, **options: Any
) -> list[Episode]:
    limits = PlaySettings(**{"max_turns": 10, "positions": 4096, **options})
    return asyncio.run(play(engine, pool, CHAT, specs_of(count), limits))  # type: ignore[arg-type]


@BOTH
@pytest.mark.parametrize(
    ("room", "needed"),
    [
        (-4, FIRST + 1),  # the first prompt has no room
        (0, FIRST + 1),  # nor has its answer
        (3, FIRST + 4),  # its answer is cut
    ],
)
def test_the_engines_context_cuts_no_episode(lockstep: bool, room: int, needed: int) -> None:
    engine = ScriptedEngine(lambda i, _: 5, STOP, lockstep=lockstep, max_model_len=FIRST + room)
    pool = ScriptedEnvironments(lambda i: 3)
    with pytest.raises(ContextOverflow, match=f"needs at least {needed} tokens.*4,096") as caught:
        played(engine, pool, 4)
    assert caught.value.payload == {"tokens": needed, "max_model_len": FIRST + room}
    assert sorted(pool.closed) == list(range(4))
    assert pool.open == 0
    assert set(engine.finished) == set(range(4))


@BOTH
def test_an_observation_without_room_outgrows_it_too(lockstep: bool) -> None:
    length = FIRST + 10
    engine = ScriptedEngine(lambda i, _: 5, STOP, lockstep=lockstep, max_model_len=length)
    with pytest.raises(ContextOverflow) as caught:
        played(engine, ScriptedEnvironments(lambda i: 3), 1)
    assert caught.value.payload["tokens"] > length


@BOTH
def test_what_was_asked_for_and_the_models_own_end_stay_finish_reasons(lockstep: bool) -> None:
    def reason(length: int, **options: Any) -> str:
        engine = ScriptedEngine(lambda i, _: 5, STOP, lockstep=lockstep, max_model_len=length)
        return played(engine, ScriptedEnvironments(lambda i: 3), 1, **options)[0].finish_reason

    assert reason(FIRST + 3, positions=FIRST + 3) == "model_context"
    assert reason(FIRST + 10, positions=FIRST + 10) == "model_context"
    assert reason(FIRST + 3, max_tokens_per_turn=3, max_turns=1) == "max_turns"
    assert reason(FIRST + 3, max_tokens_per_episode=3) == "max_tokens"
    # An answer that ends where the engine's context does was not cut.
    assert reason(FIRST + 6, max_turns=1) == "max_turns"
    with pytest.raises(RolloutFailed, match="prompt_too_long"):
        reason(FIRST - 4, positions=FIRST - 4)


@settings(max_examples=30, deadline=None)
@given(
    lockstep=st.booleans(),
    lengths=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=4), min_size=1, max_size=4),
    turns=st.integers(1, 5),
    turn_budget=st.none() | st.integers(1, 30),
    positions=st.integers(80, 300),
    start=st.integers(8, 80),
)
def test_episodes_are_those_of_an_engine_for_all_positions(
    lockstep: bool,
    lengths: list[list[int]],
    turns: int,
    turn_budget: int | None,
    positions: int,
    start: int,
) -> None:
    """Doubling the context after each `ContextOverflow` ends in the very same episodes."""

    def attempt(length: int) -> list[Any]:
        engine = ScriptedEngine(
            lambda i, t: lengths[i][t % len(lengths[i])],
            STOP,
            lockstep=lockstep,
            max_model_len=length,
        )
        pool = ScriptedEnvironments(lambda i: turns)
        options = {"positions": positions, "max_tokens_per_turn": turn_budget}
        episodes = played(engine, pool, len(lengths), **options)
        return [(e.finish_reason, [s.tokens for s in e.samples]) for e in episodes]

    length = min(start, positions)
    while True:
        try:
            found = attempt(length)
            break
        except ContextOverflow as outgrown:
            needed = outgrown.payload["tokens"]
            assert length < needed <= positions
            length = min(2 * length, positions)
    assert found == attempt(positions)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("context_overflow") / "model")


@pytest.fixture
def setting(tmp_path: Path, model: Path) -> Setting:
    return Setting(tmp_path, model)


async def _raised(worker: RolloutWorker, name: str) -> dict[str, Any]:
    calls: dict[str, Any] = {
        "rollout": lambda: worker.rollout(range(6)),
        "evaluate": lambda: worker.evaluate(4),
        "answer": lambda: worker.answer([{"role": "user", "content": "x" * 40}], 1),
    }
    with pytest.raises(ContextOverflow) as caught:
        await calls[name]()
    return caught.value.payload


def test_the_worker_knows_the_models_positions(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = setting.config["rollout"]["max_model_len"] = 60

    async def work(worker: RolloutWorker) -> Any:
        return [await _raised(worker, name) for name in ("rollout", "evaluate", "answer")]

    for payload in setting.run(work):
        assert payload["max_model_len"] == short < payload["tokens"]
    setting.config["rollout"]["max_model_len"] = 512
    played_now = setting.run(lambda worker: worker.rollout(range(6)))
    assert played_now["tally"]["episodes"] == 12
    assert "model_context" not in played_now["tally"]["finishes"]


def test_the_engines_lack_of_memory_is_typed_and_the_next_engine_works(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    grow = SlotCache._grow

    def refused(cache: SlotCache, rows: int, columns: int) -> None:
        torch.empty(2**50, dtype=torch.uint8)

    async def work(worker: RolloutWorker) -> Any:
        monkeypatch.setattr(SlotCache, "_grow", refused)
        with pytest.raises(OutOfMemory, match=r"12 answers.*max_running_requests") as caught:
            await worker.rollout(range(6))
        with pytest.raises(RuntimeError, match="call `ensure` first"):
            await worker.rollout(range(6))
        monkeypatch.setattr(SlotCache, "_grow", grow)
        await worker.ensure(setting.weights())
        return [caught.value.payload, await worker.rollout(range(6))]

    payload, result = setting.run(work)
    assert payload == {"stage": "rollout", "bytes_asked": 2**50}
    assert result["tally"]["episodes"] == 12


def test_both_cross_the_wire_with_their_numbers(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EARL_FAULT", "rollout.played0@0=memory")
    group = WorkerGroup(
        "rollout",
        "earl_core.rollout.rollout_worker:RolloutWorker",
        log_directory=setting.root / "logs",
    )
    arguments = {"config": setting.config, "run_directory": str(setting.root / "run")}
    where: dict[str, Any] = {"stage": "rollout", "iteration": 0, "deadline_seconds": 300}
    try:
        group.start({**DEPLOYMENT, "max_model_len": 60}, arguments)
        group.call("ensure", weights=setting.weights(), **where)
        with pytest.raises(WorkerCallFailed) as outgrown:
            group.call("rollout", groups=list(range(6)), **where)
        # No episode at all, whose samples cannot be written.
        with pytest.raises(WorkerCallFailed) as starved:
            group.call("rollout", groups=[], **where)
    finally:
        group.stop()
    assert starved.value.kind is OutOfMemory
    assert starved.value.payload == {"stage": "rollout", "bytes_asked": 2**40}
    assert outgrown.value.kind is ContextOverflow
    assert outgrown.value.payload["max_model_len"] == 60 < outgrown.value.payload["tokens"]
