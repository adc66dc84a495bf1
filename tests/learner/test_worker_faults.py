"""One of two ranks dies, hangs or runs out of memory: a clear error, nothing left, and again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from earl_core.cluster.errors import WorkerCallFailed, WorkerError, WorkerLost
from earl_core.cluster.rpc import same_results
from earl_core.cluster.worker_group import WorkerGroup
from earl_core.system.memory import OutOfMemory
from tests.cluster.conftest import gone_within
from tests.learner.recorded import Recorded
from tests.learnt import assert_learnt, weights_in

TARGET = "tests.learner.faulty:FaultyLearner"
AGREED = ("policy_version", "digest", "steps_applied")
SITE: dict[str, Any] = {"stage": "update", "iteration": 0, "deadline_seconds": 120}
DEPLOYMENT = {"stage": "update", "threads": 1, "shard": 2}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    made = Recorded.make(tmp_path_factory.mktemp("faults"), max_tokens_per_microbatch=25)
    yield made
    made.close()


@pytest.fixture(scope="module")
def group(recorded: Recorded) -> WorkerGroup:
    return recorded.group(TARGET, DEPLOYMENT, heartbeat_timeout_seconds=10.0)


@pytest.fixture(scope="module")
def given(recorded: Recorded) -> dict[str, Any]:
    checkpoint = str(recorded.root / "checkpoints" / "000000")
    return {"manifests": recorded.references(0), "checkpoint": checkpoint, "record": {}}


@pytest.fixture(scope="module")
def digest(group: WorkerGroup, recorded: Recorded, given: dict[str, Any]) -> str:
    """Of the weights after an update that nothing happened to."""
    group.call("restore", checkpoint=None, **SITE)
    updated = same_results(group.call("update", **given, **SITE), AGREED)
    policy = Path(given["checkpoint"]) / "policy"
    initial = weights_in(recorded.root / "model")
    assert_learnt([updated["metrics"]["grad_norm"]], initial, weights_in(policy))
    return str(updated["digest"])


def run_into(
    fault: str, group: WorkerGroup, recorded: Recorded, given: dict[str, Any]
) -> tuple[WorkerError, float]:
    """Restore, update and publish with a fault; the error, and how long after the fault it came."""
    if not group.alive:
        group.start(DEPLOYMENT, recorded.arguments, world_size=2)
    group.call("restore", checkpoint=None, **SITE)
    group.call("arm", fault=fault, **SITE)
    directory = str(recorded.store.directory)

    def update_and_publish() -> None:
        group.call("update", **given, **SITE)
        group.call("publish", directory=directory, policy_version=1, dtype="float32", **SITE)

    with pytest.raises(WorkerError) as caught:
        update_and_publish()
    now = datetime.now()
    logs = "".join(path.read_text() for path in (recorded.root / "logs").iterdir())
    reached = max(re.findall(r"(\S+ \S+),\d+ WARNING earl_core.system.fault_points", logs))
    return caught.value, (now - datetime.fromisoformat(reached)).total_seconds()


def assert_ready_again(
    group: WorkerGroup, recorded: Recorded, given: dict[str, Any], digest: str
) -> None:
    """Nothing is left of the fault, and the update after it is the one without it."""
    if group.alive:
        group.call("arm", fault="", **SITE)
    else:
        group.start(DEPLOYMENT, recorded.arguments, world_size=2)
    group.call("restore", checkpoint=None, **SITE)
    again = same_results(group.call("update", **given, **SITE), AGREED)
    assert again["digest"] == digest
    assert again["steps_applied"] == 2
    checkpoints = recorded.root / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["000000"]
    unsealed = [path for path in recorded.store.directory.iterdir() if ".partial" in path.name]
    assert not unsealed


def test_memory_that_runs_out_on_one_rank_is_a_typed_error(
    group: WorkerGroup, recorded: Recorded, given: dict[str, Any], digest: str
) -> None:
    error, seconds = run_into("update.microbatch3@0:1=memory", group, recorded, given)
    assert isinstance(error, WorkerCallFailed)
    assert seconds < 60
    assert (error.kind, error.rank) == (OutOfMemory, 1)
    assert error.payload is not None
    assert error.payload["microbatch"] == 3
    assert error.payload["microbatches"] >= 3
    assert error.payload["tokens"] > 0
    assert error.payload["bytes_asked"] == 2**40
    for part in ("rank 1", "'update' in stage 'update' of iteration 0", "microbatch 3 of"):
        assert part in str(error)
    assert "DefaultCPUAllocator" in error.log_tail
    assert_ready_again(group, recorded, given, digest)


POINTS = {
    "forward": "update.microbatch2",
    "between steps": "update.step0",
    "save": "update.save",
    "publish": "publish.write",
}
ELSEWHERE = ("forward", "save", "publish")
"""Where another rank is stopped in the test below, one finds its disk full, and one of a whole run
is killed."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "rank"),
    [
        pytest.param(
            *(point, n % 2), id=name, marks=[pytest.mark.campaign] if name in ELSEWHERE else []
        )
        for n, (name, point) in enumerate(POINTS.items())
    ],
)
def test_a_killed_rank(
    point: str,
    rank: int,
    group: WorkerGroup,
    recorded: Recorded,
    given: dict[str, Any],
    digest: str,
) -> None:
    pids = group.pids
    error, seconds = run_into(f"{point}@0:{rank}=kill", group, recorded, given)
    assert isinstance(error, WorkerLost)
    assert seconds < 60
    assert (error.rank, error.ended) == (rank, -9)
    for part in (f"rank {rank}", "stage 'update' of iteration 0", "SIGKILL", "its log"):
        assert part in str(error)
    assert not group.alive
    assert gone_within(pids, 60)
    assert_ready_again(group, recorded, given, digest)


@pytest.mark.campaign
def test_a_rank_that_hangs(
    group: WorkerGroup, recorded: Recorded, given: dict[str, Any], digest: str
) -> None:
    error, seconds = run_into("update.microbatch2@0:1=stop", group, recorded, given)
    assert isinstance(error, WorkerLost)
    assert error.how == "stalled"
    assert seconds < 60
    assert error.rank == 1
    assert "no heartbeat" in str(error)
    # The stacks are in the log; the tail has the end of them, however deep they are.
    assert "fault point update.microbatch2" in Path(error.where.log_path).read_text()
    assert "fault_points.py" in error.log_tail
    assert "_run_module_as_main" in error.log_tail
    assert_ready_again(group, recorded, given, digest)


@pytest.mark.slow
def test_a_rank_that_others_wait_for_is_named_at_the_deadline(
    group: WorkerGroup, recorded: Recorded, given: dict[str, Any], digest: str
) -> None:
    """It sends heartbeats, so that only the deadline tells; the logs hold every rank's stacks."""
    if not group.alive:
        group.start(DEPLOYMENT, recorded.arguments, world_size=2)
    group.call("restore", checkpoint=None, **SITE)
    group.call("arm", fault="update.microbatch2@0:1=hang", **SITE)
    logs = Path(recorded.root / "logs")
    with pytest.raises(WorkerError, match=r"(?s)deadline of 10 s.*Neither did ranks \[1\]"):
        group.call("update", **given, **{**SITE, "deadline_seconds": 10})
    assert "in point" in (logs / "update-1.log").read_text().rsplit("Thread", 1)[1]
    assert_ready_again(group, recorded, given, digest)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_is_full_for_one_rank(
    rank: int, group: WorkerGroup, recorded: Recorded, given: dict[str, Any], digest: str
) -> None:
    error, seconds = run_into(f"update.save@0:{rank}=enospc", group, recorded, given)
    assert isinstance(error, WorkerCallFailed)
    assert seconds < 60
    assert "No space left on device" in str(error)
    assert_ready_again(group, recorded, given, digest)
