"""A hundred and twenty iterations keep memory, open files and shared memory flat."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.flows.runs import Runs

ITERATIONS = 120


@dataclass(frozen=True)
class Footprint:
    """What the controller and its workers hold."""

    memory: int
    files: int
    shared_memory: int


def footprint(runs: Runs, controller: psutil.Process) -> Footprint:
    processes = [controller, *runs.workers()]
    return Footprint(
        memory=sum(process.memory_info().rss for process in processes),
        files=sum(process.num_fds() for process in processes),
        shared_memory=sum(map(size_of, runs.shared_memory())),
    )


def size_of(path: Path) -> int:
    """A segment's size; none once it is recycled under another name."""
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_a_hundred_and_twenty_iterations_stay_flat(runs: Runs) -> None:
    process = runs.start(
        f"iterations={ITERATIONS}",
        "rollout.prompts_per_iteration=2",
        "rollout.group_size=2",
        "update.minibatches=1",
        "algorithm.kl.placement=none",
        "algorithm.kl.coefficient=0",
        "checkpoint.every=10",
        "tracking.enabled=true",
        f"tracking.uri=sqlite:///{runs.directory}/mlflow.db",
    )
    controller = psutil.Process(process.pid)
    seen: dict[int, Footprint] = {}
    metrics = runs.run() / "metrics.jsonl"
    while process.poll() is None:
        done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        for mark in (40, 115):
            if done >= mark and mark not in seen:
                seen[mark] = footprint(runs, controller)
        time.sleep(0.2)
    assert process.returncode == 0, runs.output_path(0).read_text()
    early, late = seen[40], seen[115]
    assert late.memory < early.memory * 1.15 + 30e6, seen
    assert late.files <= early.files + 10, seen
    assert late.shared_memory <= 2 * early.shared_memory + 2**20, seen
    assert runs.shared_memory() == []
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["iteration"] for line in lines] == list(range(ITERATIONS))
