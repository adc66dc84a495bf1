"""Four ranks joined by collectives: what happens to all of them when something happens to one.

The tests share one group, in order: each starts it afresh, which is the start after the fault of
the test before it, and proves that the four ranks reach each other.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from earl_core.cluster.errors import WorkerLost
from earl_core.cluster.worker_group import WorkerGroup
from earl_core.system.processes import inspect
from tests.cgroup import memory_cgroup
from tests.cluster.conftest import gone_within

RANKS = 4
TARGET = "tests.cluster.collective_target:Collective"
ROOT = Path(__file__).resolve().parents[2]
SITE: dict[str, Any] = {"stage": "update", "iteration": 3, "deadline_seconds": 300}
Fresh = Callable[..., list[int]]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerGroup]:
    logs = tmp_path_factory.mktemp("logs")
    made = WorkerGroup("update", TARGET, log_directory=logs, heartbeat_seconds=0.2)
    yield made
    made.stop(grace_seconds=1)


@pytest.fixture
def fresh(group: Any) -> Iterator[Fresh]:
    """Starts the group; gives its pids. Afterwards nobody listens on the port the ranks met at."""
    ports: list[int] = []

    def start(**arguments: Any) -> list[int]:
        group.start({}, arguments, world_size=RANKS)
        totals = group.call("total", value=10, **SITE)
        assert [total for total, _ in totals] == [46] * RANKS
        ports.append(totals[0][1])
        pids = list(group.pids)
        assert len(set(pids)) == RANKS
        return pids

    yield start
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_lost_worker_is_reported_while_the_others_wait_for_it(
    victim: int, group: Any, fresh: Fresh
) -> None:
    pids = fresh()
    blocked: set[int] = set()
    killed_at = [0.0]

    def kill() -> None:
        killed_at[0] = time.monotonic()
        os.kill(pids[victim], signal.SIGKILL)

    def count(progress: dict[str, Any]) -> None:
        blocked.add(progress["rank"])
        if len(blocked) == RANKS:
            threading.Timer(0.3, kill).start()

    with pytest.raises(WorkerLost, match="SIGKILL") as caught:
        group.call("block", on_progress=count, **SITE)
    assert time.monotonic() - killed_at[0] < 50
    error = caught.value
    assert (error.rank, error.ended) == (victim, -signal.SIGKILL)
    assert not error.out_of_memory
    for part in ("'update'", f"rank {victim}", "iteration 3", "'block'"):
        assert part in str(error)
    assert not group.alive
    assert gone_within(pids, 60)


def test_an_out_of_memory_kill_of_one_rank_is_named(group: Any, fresh: Fresh) -> None:
    with memory_cgroup(64 << 20) as cgroup:
        pids = fresh()
        begin = time.monotonic()
        with pytest.raises(WorkerLost, match="out-of-memory killer") as caught:
            group.call("starve", rank=3, cgroup=str(cgroup), megabytes=256, **SITE)
        assert time.monotonic() - begin < 60
        assert caught.value.out_of_memory
        assert (caught.value.rank, caught.value.ended) == (3, -signal.SIGKILL)
        assert gone_within(pids, 60)


def test_ranks_that_wait_for_ever_end_at_the_deadline(group: Any, fresh: Fresh) -> None:
    pids = fresh()
    with pytest.raises(WorkerLost, match=r"(?s)deadline of 4 s.*in block") as caught:
        group.call("block", **{**SITE, "deadline_seconds": 4.0})
    assert "iteration 3" in str(caught.value)
    assert not group.alive
    assert gone_within(pids, 60)


def test_a_stop_closes_every_rank(group: Any, fresh: Fresh, tmp_path: Path) -> None:
    pids = fresh(closed=str(tmp_path))
    group.stop()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3"]
    assert not group.alive
    assert gone_within(pids, 20)


def test_a_killed_controller_takes_ranks_along_that_block_in_a_collective(tmp_path: Path) -> None:
    controller = subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.blocked_controller", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    )
    try:
        assert controller.stdout is not None
        told = json.loads(controller.stdout.readline())
        everyone = told["pids"] + told["supervisors"]
        assert len(set(everyone)) == 2 * RANKS
        assert all(inspect(pid) is not None for pid in everyone)
        time.sleep(0.3)
        controller.send_signal(signal.SIGKILL)
        assert gone_within(everyone, 60)
    finally:
        controller.kill()
        controller.wait()
        assert controller.stdout is not None
        controller.stdout.close()
