"""Worker groups that are started side by side: each once, and none left behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from earl_core.cluster.errors import WorkerCallFailed
from earl_core.cluster.fork_server import fork_server
from earl_core.config import parse_config
from earl_core.control import worker_groups as groups_module
from earl_core.control.worker_environment import worker_environment
from earl_core.control.worker_groups import WorkerGroups
from earl_core.deployment.shapes import Hardware
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.run import RunDirectory
from earl_core.selector.model.devices import cluster
from earl_core.system.errors import Cancelled
from earl_core.system.processes import inspect

ROLLOUT = ("rollout", StageDeployment(stage="rollout"))
UPDATE = ("update", StageDeployment(stage="update"))
Events = list[tuple[str, bool]]
Make = Callable[[str], tuple[WorkerGroups, Events]]


class Slow:
    """A target that takes a second to build."""

    def __init__(self, context: Any, deployment: dict[str, Any], **arguments: Any) -> None:
        time.sleep(1.0)
        self.deployment = deployment

    def prepare(self) -> str:
        return "prepared"

    def answer(self) -> int:
        return 42

    def reshard(self, deployment: dict[str, Any]) -> dict[str, Any]:
        self.deployment = deployment
        return {}

    def running(self) -> int:
        return int(self.deployment["max_running_requests"])


class Broken(Slow):
    """A target that cannot be built."""

    def __init__(self, context: Any, deployment: dict[str, Any], **arguments: Any) -> None:
        raise ValueError("cannot be built")


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Groups of light targets, `update` of the given class, and what was said when they began."""
    config = parse_config(
        {
            "name": "run",
            "runs_directory": str(tmp_path / "runs"),
            "iterations": 1,
            "model": {"path": str(tmp_path)},
            "environment": {"name": "tic_tac_toe"},
            "rollout": {"prompts_per_iteration": 2, "group_size": 2, "max_turns": 1},
            "dispatch": {"directory": str(tmp_path / "shm")},
        }
    )
    run = RunDirectory.open(config)
    events: Events = []

    def make(update: str) -> tuple[WorkerGroups, Events]:
        here = "tests.flows.test_start_ahead"
        targets = {"rollout": f"{here}:Slow", "update": f"{here}:{update}"}
        monkeypatch.setattr(groups_module, "TARGETS", targets)

        def listen(role: str, iteration: int, event: dict[str, Any]) -> None:
            live = [groups.live(name) is not None for name in ("rollout", "update")]
            events.append((role, any(live)))

        groups = WorkerGroups(
            run.config, run.path, run.logs, Hardware(cpu_cores=4, memory_bytes=2**33), listen
        )
        opened.append(groups)
        return groups, events

    opened: list[WorkerGroups] = []
    yield make
    for groups in opened:
        groups.close()
    run.close()


def answer(groups: WorkerGroups, wanted: tuple[str, StageDeployment]) -> int:
    role, deployment = wanted
    results: list[Any] = groups.call(deployment, role, "answer", 0)
    return int(results[0])


def assert_nothing_left(groups: WorkerGroups, pids: list[int]) -> None:
    groups.close()
    ours = {fork_server().pid}
    assert [pid for pid in pids if pid not in ours and inspect(pid) is not None] == []
    assert groups.live("rollout") is groups.live("update") is None
    with pytest.raises(Cancelled):
        groups.get(*ROLLOUT)


def test_groups_start_side_by_side_and_once(
    made: Make,
) -> None:
    groups, events = made("Slow")
    groups.start_ahead([ROLLOUT, UPDATE])
    assert answer(groups, UPDATE) == answer(groups, ROLLOUT) == 42
    # Both had begun before either was there.
    assert sorted(events) == [("rollout", False), ("update", False)]
    ahead = groups.started_ahead("rollout")
    assert ahead is not None
    assert ahead.done - ahead.begun > 1.0
    assert groups.started_ahead("rollout") is None
    # What lives is left alone, whatever its layout: its stage lays it out anew.
    first = groups.live("rollout")
    groups.start_ahead([("rollout", StageDeployment(stage="rollout", threads=2))])
    assert answer(groups, ROLLOUT) == 42
    assert groups.live("rollout") is first


def test_an_engine_takes_another_limit_and_is_not_started_again(made: Make) -> None:
    groups, _ = made("Slow")
    role, engine = ROLLOUT
    first = groups.get(role, engine._replace(max_running_requests=64))
    for limit in (16, 48):
        limited = engine._replace(max_running_requests=limit)
        assert groups.call(limited, role, "running", 0) == [limit]
        assert groups.live(role) is first
    groups.get(role, engine._replace(max_running_requests=48, max_model_len=64))
    assert groups.live(role) is not first


def test_a_start_that_fails_leaves_nothing_of_the_other(
    made: Make,
) -> None:
    groups, _ = made("Broken")
    groups.start_ahead([ROLLOUT, UPDATE])
    with pytest.raises(WorkerCallFailed, match="cannot be built"):
        groups.get(*UPDATE)
    assert_nothing_left(groups, started(groups))


def test_an_interrupt_while_groups_start_ends_them(
    made: Make,
) -> None:
    groups, _ = made("Slow")
    groups.start_ahead([ROLLOUT, UPDATE])
    pids = started(groups)
    began = time.monotonic()
    groups.interrupt()
    with pytest.raises(Cancelled):
        groups.get(*UPDATE)
    assert_nothing_left(groups, pids)
    assert time.monotonic() - began < 60


def started(groups: WorkerGroups) -> list[int]:
    """Processes of a rank that is being started: the supervisors that this process has."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = [p for p in psutil.Process().children(recursive=True) if _is_rank(p)]
        if found:
            return [process.pid for process in found]
        time.sleep(0.05)
    raise AssertionError("no rank was started")


def _is_rank(process: psutil.Process) -> bool:
    try:
        return "earl_core.cluster" in " ".join(process.cmdline())
    except psutil.Error:
        return False


@pytest.mark.parametrize("own", ["", "max_split_size_mb:128"])
def test_learners_on_gpus_take_expandable_segments(
    monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    if own:
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", own)
    eight = cluster("h100-80gb", 1, 8)
    found = {
        role: worker_environment(role, 2, eight).get("PYTORCH_ALLOC_CONF")
        for role in ("rollout", "reference", "update")
    }
    theirs = None if own else "expandable_segments:True,pinned_max_round_threshold_mb:64"
    assert found == {"rollout": None, "reference": theirs, "update": theirs}
    here = Hardware(cpu_cores=2, memory_bytes=2**34)
    assert "PYTORCH_ALLOC_CONF" not in worker_environment("update", 2, here)
    if theirs:
        # It raises for a word that torch does not know.
        torch._C._accelerator_setAllocatorSettings(theirs)
        torch._C._accelerator_setAllocatorSettings("")
        monkeypatch.setattr("earl_core.control.worker_environment.installed", lambda name: "2.11.0")
        older = worker_environment("update", 2, eight)
        assert older["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
