"""Groups that are played as a stream: each is trained once, none is too old, kills or not."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from earl_core.config import load_config
from earl_core.rollout.engines.engine import GenerationRequest
from earl_core.rollout.engines.torch_engine import TorchEngine
from earl_core.rollout.errors import EngineLost
from earl_core.run.group_journal import GroupJournal
from flows.debug import Debugged, opened_here
from tests.flows.runs import KILLED, Runs

BATCH, SIZE = 4, 2
LENGTHS = {
    "name": "tests.rollout.environments:Lengths",
    "options": {"every": 7, "long": 30},
}


def stream(staleness: int, iterations: int) -> tuple[str, ...]:
    """Overrides of a run in which one group in seven is fifteen times as long as the others."""
    return (
        f"iterations={iterations}",
        f"schedule={{staleness: {staleness}, mode: stream}}",
        "algorithm.importance_correction={}",
        "algorithm.kl={placement: none, coefficient: 0}",
        f"environment={json.dumps(LENGTHS)}",
        f"rollout.prompts_per_iteration={BATCH}",
        f"rollout.group_size={SIZE}",
        "rollout.max_turns=40",
        "rollout.max_running_requests=8",
        "tracking.keep_episodes=all",
    )


def assert_once_and_young(run: Path, staleness: int, iterations: int) -> np.ndarray:
    """Batch k is its groups, whole, and no token is older than the staleness. Returns the ages of
    all trained tokens. Read from the kept rows of the shards, without EARL."""
    ages = []
    for k in range(iterations):
        table = pq.read_table(run / "iterations" / f"{k:06d}" / "episodes.parquet")
        wanted = range(k * BATCH * SIZE, (k + 1) * BATCH * SIZE)
        assert sorted(table["episode_id"].to_pylist()) == list(wanted)
        assert table["group_id"].to_pylist() == [e // SIZE for e in table["episode_id"].to_pylist()]
        columns = (table[name].combine_chunks().values for name in ("token_versions", "loss_mask"))
        versions, mask = (np.array(each) for each in columns)
        assert (versions[mask == 0] == -1).all()
        ages.append(k - versions[mask == 1])
        assert 0 <= ages[-1].min() <= ages[-1].max() <= staleness, k
    return np.concatenate(ages)


def parked_answers(run: Path) -> dict[int, dict[int, list[list[int]]]]:
    """Of each parked group and each of its episodes the sampled tokens and their versions."""
    groups = {}
    for path in (run / "parked").iterdir():
        found = json.loads(path.read_bytes()[32:])
        groups[found["group"]] = {
            int(episode): [
                [value for turn in _turns(record) for value in values(turn)]
                for values in (_tokens, _versions)
            ]
            for episode, record in found["episodes"].items()
        }
    return groups


def _turns(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [*record["turns"], *([record["open"]] if record["open"] else [])]


def _tokens(turn: dict[str, Any]) -> list[int]:
    tokens: list[int] = turn["tokens"]
    return tokens


def _versions(turn: dict[str, Any]) -> list[int]:
    return [version for version, first, end in turn["spans"] for _ in range(first, end)]


def assert_taken_up(
    run: Path, parked: dict[int, dict[int, list[list[int]]]], iteration: int
) -> None:
    """The episodes of these groups begin with what is parked of them, and later tokens are of
    weights that the iteration or a later one trains."""
    for group, episodes in parked.items():
        path = run / "iterations" / f"{group // BATCH:06d}" / "episodes.parquet"
        rows = {row["episode_id"]: row for row in pq.read_table(path).to_pylist()}
        for episode, (tokens, versions) in episodes.items():
            row = rows[episode]
            mask = np.array(row["loss_mask"]) == 1
            count, named = len(tokens), np.array(row["token_versions"])[mask]
            assert np.array(row["tokens"])[mask][:count].tolist() == tokens
            assert named[:count].tolist() == versions
            assert (named[count:] >= iteration).all()


def train(runs: Runs, *overrides: str, alone: bool = False) -> None:
    """Train in this process, without Prefect. alone: one iteration, as if it was scheduled by
    itself."""
    config = load_config(str(runs.config), list(overrides))
    with opened_here(config, lambda *_: None) as controller:
        controller.single_iteration = alone
        while (number := controller.next_iteration()) < config.iterations:
            Debugged(controller, number).whole()
            if alone:
                return
        controller.run.finish()


def test_unfinished_groups_go_on_under_new_weights_and_are_trained_once(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the run was stopped between the seal of a group and its line, and without shared
    memory after that. What it stopped in order has parked goes on at the next token. A clock
    decides which groups begin before their batch is asked for."""
    asked = stream(2, 6)
    monkeypatch.setenv("EARL_CLOCK", "0")
    for fault in ("group.taken5@1", "update.step0@2"):
        monkeypatch.setenv("EARL_FAULT", f"{fault}=raise")
        with pytest.raises(Exception, match=fault):
            train(runs, *asked)
    monkeypatch.delenv("EARL_FAULT")
    parked = parked_answers(runs.run())
    shutil.rmtree(runs.directory / "shm")
    train(runs, *asked, alone=True)
    sealed = GroupJournal(runs.run()).since(0).values()
    assert max(each.group for each in sealed if each.tally) == 3 * BATCH - 1
    train(runs, *asked)
    assert parked
    assert_taken_up(runs.run(), parked, 2)
    assert not os.listdir(runs.run() / "parked")
    runs.assert_learnt()
    assert set(assert_once_and_young(runs.run(), 2, 6).tolist()) == {0, 1, 2}
    lines = {int(line["iteration"]): line for line in runs.metrics()}
    assert [lines[k]["rollout/groups_carried"] > 0 for k in (3, 4, 5)] == [False, True, True]
    resumed = [line["rollout/groups_resumed"] for line in lines.values()]
    assert sum(resumed[2:]) == len(parked)
    # The long group of the last batch began two iterations before.
    rows = pq.read_table(runs.run() / "iterations/000005/episodes.parquet").to_pylist()
    assert {3, 5} <= {v for row in rows if row["group_id"] == 20 for v in row["token_versions"]}
    assert runs.shared_memory() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.campaign)]
)
def test_what_plays_when_a_run_is_asked_to_stop_goes_on_at_the_next_token(
    runs: Runs, number: signal.Signals
) -> None:
    """As the end of a container, a cancelled flow run and Ctrl-C ask, while the learner works."""
    gate = runs.directory / "gate"
    gate.touch()
    runs.environment |= {"EARL_FAULT_GATE": str(gate), "EARL_CLOCK": "0"}
    process = runs.start(*stream(2, 4), fault="update.step0@1=wait")
    deadline = time.monotonic() + 240
    while (1, "update") not in runs.executed("started"):
        assert process.poll() is None, runs.output_path(0).read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    process.wait(120)
    runs.wait_for_workers_to_end()
    parked = parked_answers(runs.run())
    assert parked
    train(runs, *stream(2, 4))
    assert_once_and_young(runs.run(), 2, 4)
    assert_taken_up(runs.run(), parked, 1)
    assert sum(line["rollout/groups_anew"] for line in runs.metrics()) == 0
    runs.assert_learnt()
    assert runs.shared_memory() == []


@pytest.mark.slow
def test_under_a_clock_a_stream_repeats_bit_for_bit(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines beside the learner, a curriculum over rows; another clock gives other bits."""
    rows = {"options": {**LENGTHS["options"], "rows": 40}, "curriculum": {"memory": 0.5}}
    asked = (
        *stream(1, 3),
        "stages={placement: shared, rollout: {replicas: 2}}",
        f"environment={json.dumps(LENGTHS | rows)}",
    )
    for name, clock in (("one", "2"), ("again", "2"), ("other", "6")):
        monkeypatch.setenv("EARL_CLOCK", clock)
        train(runs, *asked, f"name={name}")
        assert_once_and_young(runs.run(name), 1, 3)
    known = [line["rollout/rows/known_share"] for line in runs.metrics("one")]
    assert known == [0, 0, BATCH / 40]
    runs.assert_learnt("one", than="other")
    assert runs.weights(2, "one") == runs.weights(2, "again") != runs.weights(2, "other")


@pytest.mark.slow
def test_what_an_engine_was_playing_that_was_ended_aside_goes_on(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory cannot be restored, which ends it and is no error of a stage."""
    restored = []

    async def restore_memory(engine: TorchEngine) -> None:
        restored.append(engine)
        if len(restored) == 3:
            raise RuntimeError("no memory to restore")
        await restoring(engine)

    restoring = TorchEngine.restore_memory
    monkeypatch.setattr(TorchEngine, "restore_memory", restore_memory)
    monkeypatch.setenv("EARL_CLOCK", "0")
    train(runs, *stream(2, 6))
    assert_once_and_young(runs.run(), 2, 6)
    assert sum(line["rollout/groups_resumed"] for line in runs.metrics()) > 0
    assert sum(line["rollout/groups_anew"] for line in runs.metrics()) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [RuntimeError, EngineLost])
def test_what_ends_an_engine_that_plays_ahead_is_known_to_the_next_collect(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """An error is raised as it is, whether or not the batch is complete; the run goes on when it is
    begun again. A loss is noted and costs no repeat, of which there is none."""
    raised, collected = threading.Event(), runs.run() / "iterations/000000/collect.json"

    def whole() -> bool:
        """The first batch is played, so that nobody waits for this engine until it is sealed."""
        return {*range(BATCH)} <= {*GroupJournal(runs.run()).since(0)}

    async def generate(engine: TorchEngine, requests: Sequence[GenerationRequest]) -> object:
        ahead = all(each.sequence_id >= BATCH * SIZE for each in requests)
        for look in itertools.count():
            if raised.is_set() or not ahead or (look >= 50 and not whole()):
                break
            if collected.exists():
                raised.set()
                raise kind("the device fell over")
            await asyncio.sleep(0.01)
        return await generating(engine, requests)

    generating = TorchEngine.generate
    monkeypatch.setattr(TorchEngine, "generate", generate)
    options = {**LENGTHS, "options": {"every": 1, "long": 6, "seconds": 0.01}}
    asked = *stream(1, 3), "stages.placement=shared", f"environment={json.dumps(options)}"
    config = load_config(str(runs.config), [*asked, "deadlines.repeats=0"])
    with opened_here(config, lambda *_: None) as controller:
        Debugged(controller, 0).whole()
        assert raised.wait(300)
        if kind is EngineLost:
            Debugged(controller, 1).whole()
        else:
            with pytest.raises(Exception, match="the device fell over"):
                Debugged(controller, 1).whole()
    train(runs, *asked)
    assert_once_and_young(runs.run(), 1, 3)
    told = [line["event"] for line in runs.ledger() if "played ahead was lost" in line["event"]]
    assert len(told) == (kind is EngineLost)
    if kind is EngineLost:
        line = runs.metrics()[1]
        assert line["rollout/groups_resumed"] + line["rollout/groups_anew"] > 0


def faults(seed: int) -> list[str]:
    """Where a run is killed: the controller between any two things that it writes, an engine before
    and after it seals a group, the learner within and after its steps."""
    draw = np.random.default_rng(seed)
    batch = int(draw.integers(0, 3))
    group = int(draw.integers(batch * BATCH, (batch + 1) * BATCH))
    return [
        f"group.taken{group}@{batch}",
        f"collect.{draw.choice(['before', 'seal', 'after'])}@{batch}",
        f"stable.{draw.choice(['before', 'after'])}@{batch}",
        f"group.{draw.choice(['played', 'sealed'])}{group}@{batch}",
        f"update.{draw.choice(['step0', 'seal'])}@{batch}",
    ]


def killed_at(runs: Runs, name: str, places: list[str], placement: str) -> None:
    """A run of three iterations that is killed at each of these places once, and resumed."""
    asked = (*stream(1, 3), f"name={name}", f"stages.placement={placement}", "deadlines.repeats=9")
    once = runs.directory / f"{name}-faults"
    once.mkdir()
    runs.environment["EARL_FAULT_ONCE"] = str(once)
    fault = ";".join(f"{place}=kill" for place in places)
    for _ in range(len(places) + 1):
        process = runs.start(*asked, fault=fault)
        process.wait(300)
        runs.wait_for_workers_to_end()
        if process.returncode == 0:
            break
        assert process.returncode == KILLED, runs.output_path(len(runs.started) - 1).read_text()
    assert process.returncode == 0
    assert len(os.listdir(once)) >= max(1, len(places) // 2)
    runs.assert_learnt(name)
    assert_once_and_young(runs.run(name), 1, 3)
    assert runs.shared_memory() == []


@pytest.mark.slow
def test_after_a_kill_of_the_controller_each_group_is_trained_once(runs: Runs) -> None:
    killed_at(runs, "run", ["collect.seal@1"], "shared")


@pytest.mark.slow
def test_processes_that_are_told_to_end_park_what_they_play(runs: Runs) -> None:
    """While both engines play on for the next batch."""
    engines = "stages={placement: shared, rollout: {replicas: 2}}"
    options = {**LENGTHS, "options": {"every": 1, "long": 30, "seconds": 0.01}}
    asked = (*stream(1, 3), engines, f"environment={json.dumps(options)}")
    # Two slices beyond a batch, and no further.
    runs.environment["EARL_CLOCK"] = "2"
    runs.train(*asked, fault="update.before@1=raise", expect=1)
    parked = parked_answers(runs.run())
    assert len(parked) > 1
    runs.train(*asked)
    assert_once_and_young(runs.run(), 1, 3)
    assert_taken_up(runs.run(), parked, 1)
    assert sum(line["rollout/groups_resumed"] for line in runs.metrics()) >= len(parked)
    assert not os.listdir(runs.run() / "parked")


@pytest.mark.campaign
def test_a_hundred_kills_lose_and_repeat_no_group(runs: Runs) -> None:
    for seed in range(20):
        killed_at(runs, f"run{seed}", faults(seed), ("colocated", "shared")[seed % 2])
