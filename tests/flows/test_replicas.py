"""Several engines: equal results whatever their number, and none of the episodes lost with one."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import psutil
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from earl_core.cluster.errors import WorkerLost
from earl_core.cluster.worker_group import WorkerGroup
from earl_core.config import parse_config
from earl_core.control.dealing import contiguous
from earl_core.control.engine_turns import EngineTurns
from earl_core.control.failure_diagnosis import ReplicasLost
from earl_core.control.learner import call_learner, ensure_learner
from earl_core.control.prompt_waves import whole_iteration
from earl_core.control.replicas import play_evaluation, play_rollout
from earl_core.control.run_controller import RunController, close_controller, open_controller
from earl_core.control.stage_execution import judge
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.dispatch import Manifest
from earl_core.run.past_lengths import PastLength
from earl_core.trajectory.schema import SAMPLE_BITS
from earl_core.weights.load import manifest_from_directory
from earl_core.weights.publish import publish
from tasks.stage import run_stage
from tasks.tracking.tracker import Tracker

GAMES = {"name": "tic_tac_toe", "options": {"style": "compact"}}
PROMPTS, GROUP = 7, 2
ROLLOUT = {
    "engine": "torch",
    "dtype": "float32",
    "prompts_per_iteration": PROMPTS,
    "group_size": GROUP,
    "max_turns": 5,
    "max_tokens_per_turn": 2,
}


def played(
    controller: RunController, deployment: StageDeployment, iteration: int, weights: Manifest
) -> dict[str, Any]:
    """The iteration's episodes, all at once."""
    wave = whole_iteration(controller.run, iteration)
    return play_rollout(controller, deployment, iteration, weights, "rollout", wave)


def engines(count: int) -> StageDeployment:
    return StageDeployment(stage="rollout", replicas=count, max_running_requests=64)


Opened = Callable[..., RunController]


@pytest.fixture
def opened(tmp_path: Path, tiny_model: Path) -> Iterator[Opened]:
    """Opens runs without a flow around them, and closes them."""
    controllers: list[RunController] = []

    def make(environment: dict[str, Any] = GAMES, **changes: Any) -> RunController:
        raw = {
            "name": f"run{len(controllers)}",
            "seed": 3,
            "iterations": 4,
            "runs_directory": str(tmp_path / "runs"),
            "model": {"path": str(tiny_model)},
            "environment": environment,
            "rollout": ROLLOUT,
            "evaluation": {"episodes": 11, "temperature": 0.0},
            "tracking": {"enabled": False, "trace_episodes": 2},
            "dispatch": {"directory": str(tmp_path / "shm")},
            **changes,
        }
        controllers.append(open_controller(parse_config(raw), Tracker))
        return controllers[-1]

    yield make
    for controller in controllers:
        close_controller(controller)


@pytest.fixture
def weights(tiny_model: Path) -> Manifest:
    published = manifest_from_directory(tiny_model, 0).model_dump(mode="json")
    return Manifest(
        run="r", iteration=0, stage="initial", key="", policy_version=0,
        outputs={"weights": published},
    )  # fmt: skip


def rows(controller: RunController, result: dict[str, Any]) -> list[dict[str, Any]]:
    """All samples in the order of the shards."""
    found: list[dict[str, Any]] = []
    for entry in result["shards"]:
        path = controller.run.store.directory / entry["file"]
        with pa.memory_map(str(path)) as source:
            found += pa.ipc.open_file(source).read_all().to_pylist()
    return found


def numbers(result: dict[str, Any]) -> dict[str, float]:
    """The metrics that do not depend on the clock or on the machine."""
    timed = ("seconds", "per_second", "share", "memory", "replicas", "engines")
    return {k: v for k, v in result["metrics"].items() if not any(word in k for word in timed)}


def test_shares_are_contiguous_balanced_and_never_empty() -> None:
    assert contiguous(range(3, 10), 3) == [range(3, 5), range(5, 7), range(7, 10)]
    assert contiguous(range(2), 5) == [range(0, 1), range(1, 2)]
    assert contiguous(range(0), 2) == []


def test_engines_come_and_go_and_change_nothing(
    opened: Opened, weights: Manifest, tmp_path: Path
) -> None:
    """One engine, three of them, and three of which one is killed in the middle of its games."""
    options = {"held": [PROMPTS - 1], "folder": str(tmp_path)}
    controller = opened({"name": "tests.rollout.environments:HeldGame", "options": options})
    progress: list[dict[str, Any]] = []
    controller.listener = lambda stage, iteration, event: progress.append(event)

    alone = played(controller, engines(1), 0, weights)
    alone["rows"] = rows(controller, alone)
    greedy = play_evaluation(controller, engines(1), 0, weights)
    first = controller.groups.live("rollout")
    together = played(controller, engines(3), 0, weights)
    assert_equal(controller, together, alone)
    assert [len(alone["shards"]), len(together["shards"])] == [1, 3]
    assert together["metrics"]["replicas"] == 3
    evaluated = play_evaluation(controller, engines(3), 0, weights)
    assert evaluated["outcomes"] == greedy["outcomes"]
    assert numbers(evaluated) == pytest.approx(numbers(greedy))
    # What needs no other layout stays as it is.
    assert controller.groups.live("rollout") is first

    (tmp_path / "hold").touch()
    killer = threading.Thread(target=kill_the_held_engine, args=(controller, tmp_path), daemon=True)
    killer.start()
    survived = played(controller, engines(3), 0, weights)
    killer.join()
    assert_equal(controller, survived, alone)
    assert survived["metrics"]["replicas_lost"] == 1
    assert progress[-1]["episodes"] == progress[-1]["episodes_done"] == PROMPTS * GROUP
    assert progress[-1]["engines"] == 2
    (note,) = [x for x in controller.run.ledger() if "was lost" in x["event"]]
    assert "signal 9" in note["event"]
    # The lost engine is back at the next use; one that no layout has any more is gone.
    again = played(controller, engines(2), 0, weights)
    assert again["metrics"]["replicas_lost"] == 0
    assert_equal(controller, again, alone)
    assert controller.groups.live("rollout", 1) is not None
    assert controller.groups.live("rollout", 2) is None
    assert controller.groups.peak_bytes("rollout") > 10**7

    # One that is idle, and the one that plays: who takes over is a fresh process.
    for held in tmp_path.glob("held-*"):
        held.unlink()
    (tmp_path / "hold").touch()
    killer = threading.Thread(
        target=kill_the_idle_engine_too, args=(controller, tmp_path), daemon=True
    )
    killer.start()
    taken_over = played(controller, engines(2), 0, weights)
    killer.join()
    assert_equal(controller, taken_over, alone)
    assert taken_over["metrics"]["replicas_lost"] == 2
    notes = [x["event"] for x in controller.run.ledger() if "was lost" in x["event"]]
    assert len(notes) == 3
    assert all("signal 9" in note for note in notes)


class Lengths:
    """Of the prompts, instead of a history."""

    def expected(self, prompts: Sequence[Any], last: int) -> list[PastLength | None]:
        if last < 0:
            raise OSError("no such disk")
        means = [1.0, 9.0, None, 3.0, 8.0, 1.0, 2.0]
        return [mean and PastLength(mean, 0.0) for mean in means]


def test_prompts_dealt_by_length_are_played_alike(opened: Opened, weights: Manifest) -> None:
    """And contiguously where past lengths cannot be read."""
    controller = opened()
    alone = played(controller, engines(1), 1, weights)
    dealt = opened(rollout={**ROLLOUT, "deal": "longest_first"})
    dealt.past_lengths = cast(Any, Lengths())
    for iteration, parts in ((0, [[0, 1, 2], [3, 4, 5, 6]]), (1, [[0, 2, 4, 5], [1, 3, 6]])):
        result = played(dealt, engines(2), iteration, weights)
        groups = [
            sorted({row >> SAMPLE_BITS for row in entry["row_ids"]}) for entry in result["shards"]
        ]
        first = iteration * PROMPTS
        assert groups == [[GROUP * (first + p) + k for p in part for k in (0, 1)] for part in parts]
    (note,) = [line["event"] for line in dealt.run.ledger() if "contiguously" in line["event"]]
    assert "no such disk" in note
    mine = sorted(rows(dealt, result), key=lambda row: row["sample_id"])
    for one, other in zip(mine, rows(controller, alone), strict=True):
        for name in ("sample_id", "tokens", "loss_mask", "turn_rewards", "texts"):
            assert one[name] == other[name]
        assert one["rollout_logprobs"] == pytest.approx(other["rollout_logprobs"], abs=1e-5)


def test_an_engine_goes_on_to_the_next_rollout_and_comes_back(
    opened: Opened, weights: Manifest, tiny_model: Path, tmp_path: Path
) -> None:
    """For a share of an engine that is lost, under the version of the rollout before."""
    options = {"held": [PROMPTS - 1], "folder": str(tmp_path)}
    controller = opened({"name": "tests.rollout.environments:HeldGame", "options": options})
    tensors = load_file(tiny_model / "model.safetensors")
    other = {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in tensors.items()}
    published = publish(other, tmp_path / "weights", 1, "float32").model_dump(mode="json")
    newer = weights.model_copy(update={"outputs": {"weights": published}})
    alone = [played(controller, engines(2), k, each) for k, each in enumerate((weights, newer))]
    for each in alone:
        each["rows"] = rows(controller, each)
    left: queue.Queue[int] = queue.Queue()
    controller.turns = EngineTurns(left.put)
    (tmp_path / "hold").touch()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(played, controller, engines(2), 0, weights)
        assert left.get(timeout=300) == 0
        second = pool.submit(played, controller, engines(2), 1, newer)
        assert left.get(timeout=300) == 1
        assert not first.done()
        kill_the_held_engine(controller, tmp_path)
        assert_equal(controller, first.result(300), alone[0])
        ahead = second.result(300)
    assert first.result()["metrics"]["replicas_lost"] == 1
    told = [
        [(row["episode_id"], row["tokens"]) for row in each]
        for each in (rows(controller, ahead), alone[1]["rows"])
    ]
    assert told[0] == told[1]
    # The versions do not play alike.
    assert [row["tokens"] for row in alone[0]["rows"]] != [
        row["tokens"] for row in alone[1]["rows"]
    ]


def kill_the_idle_engine_too(controller: RunController, folder: Path) -> None:
    """SIGKILL to the engine of two whose games are over, then to the one whose games are held."""
    before = sealed(controller)
    groups: list[Any] = [controller.groups.live("rollout", member) for member in range(2)]
    while not (held := list(folder.glob("held-*"))):
        time.sleep(0.02)
    parents = {p.pid for p in psutil.Process(int(held[0].name.split("-")[1])).parents()}
    (idle,) = [group for group in groups if group and not parents & set(group.pids)]
    # Idle is who has told of its games, which is later than their shard; who is not busy before
    # that has not begun.
    while not (sealed(controller) - before) or idle._callers:
        time.sleep(0.02)
    os.kill(idle.pids[0], signal.SIGKILL)
    # A call that comes before the loss is known fails with it.
    while not idle.silent_loss:
        time.sleep(0.02)
    kill_the_held_engine(controller, folder)


def sealed(controller: RunController) -> set[str]:
    """Names of the shards that lie in the run's store."""
    return {path.name for path in controller.run.store.directory.glob("*.arrow")}


def kill_the_held_engine(controller: RunController, folder: Path, child: str = "") -> None:
    """SIGKILL to the engine's worker whose games are held, or to a child of it by its name."""
    while not (held := list(folder.glob("held-*"))):
        time.sleep(0.02)
    parents = {p.pid for p in psutil.Process(int(held[0].name.split("-")[1])).parents()}
    groups: list[Any] = [controller.groups.live("rollout", member) for member in range(3)]
    (victim,) = {pid for group in groups if group for pid in group.pids} & parents
    if child:
        below = psutil.Process(victim).children(recursive=True)
        victim = next(process.pid for process in below if child in process.name())
    os.kill(victim, signal.SIGKILL)
    (folder / "hold").unlink()


def assert_equal(
    controller: RunController, played: dict[str, Any], expected: dict[str, Any]
) -> None:
    mine, theirs = rows(controller, played), expected["rows"]
    assert [sample["episode_id"] for sample in mine] == list(range(PROMPTS * GROUP))
    for one, other in zip(mine, theirs, strict=True):
        for name in ("group_id", "tokens", "loss_mask", "turn_starts", "turn_rewards", "texts"):
            assert one[name] == other[name]
        assert one["rollout_logprobs"] == pytest.approx(other["rollout_logprobs"], abs=1e-5)
    assert numbers(played) == pytest.approx(numbers(expected))


def test_a_learner_lost_after_it_was_made_ready_is_a_loss(opened: Opened) -> None:
    """And not a fresh one without the state, whose complaint would end the run."""
    controller, learner = opened(), StageDeployment(stage="update")
    ensure_learner(controller, learner, 0, version=0)
    group = controller.groups.live("update")
    assert isinstance(group, WorkerGroup)
    os.kill(group.pids[0], signal.SIGKILL)
    while group.alive:
        time.sleep(0.02)
    for method, arguments in (
        ("update", {"manifests": [], "checkpoint": None, "record": {}}),
        ("save", {"directory": "somewhere"}),
    ):
        with pytest.raises(WorkerLost, match="signal 9"):
            call_learner(controller, learner, method, 1, **arguments)
    # Two calls have told of it, so that it is no silent loss.
    ensure_learner(controller, learner, 0, version=0)
    assert controller.groups.rebuilt == {}
    group = controller.groups.live("update")
    assert isinstance(group, WorkerGroup)
    os.kill(group.pids[0], signal.SIGKILL)
    while group.alive:
        time.sleep(0.02)
    ensure_learner(controller, learner, 0, version=0)
    assert controller.groups.rebuilt == {0: 1}
    assert "and is built again" in list(controller.run.ledger())[-1]["event"]


def test_episodes_that_end_every_engine_end_the_run(
    opened: Opened, weights: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EARL_FAULT", "rollout.played0@0=kill")
    controller = opened()
    with pytest.raises(ReplicasLost, match=r"(?s)prompts 0 to 0 .* have cost 2 engines.*signal 9"):
        played(controller, engines(3), 0, weights)
    with pytest.raises(ReplicasLost, match=r"(?s)all 2 rollout engines were lost.*signal 9"):
        played(controller, engines(2), 0, weights)


@pytest.mark.campaign
def test_an_engine_lost_between_its_shard_and_its_report(
    opened: Opened, weights: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EARL_FAULT", "rollout.sealed0@0=kill")
    controller = opened()
    found: dict[str, Any] = {}

    def body() -> dict[str, Any]:
        found.update(played(controller, engines(2), 0, weights))
        return {"shards": found["shards"]}

    judge(controller, 0, "rollout", [])
    run_stage(controller, 0, "rollout", body)
    assert [s["episode_id"] for s in rows(controller, found)] == list(range(PROMPTS * GROUP))
    known = {entry["file"] for entry in found["shards"]}
    on_disk = {path.name for path in controller.run.store.directory.glob("*-rollout-*.arrow")}
    assert on_disk == known
    with pytest.raises(WorkerLost, match="signal 9"):
        played(controller, engines(1), 0, weights)
