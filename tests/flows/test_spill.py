"""A run on several experience ranks whose shared memory is lost with the machine, and resumed."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.flows.runs import Runs


@pytest.mark.slow
def test_lost_shared_memory_comes_back_from_the_spill_and_nothing_is_left(
    runs: Runs, tmp_path: Path
) -> None:
    spill = tmp_path / "spill"
    settings = (
        "iterations=1",
        "experience.ranks=3",
        "algorithm.advantage=reinforce_plus_plus",
        "dispatch.durability=spill",
        f"dispatch.spill_url=file://{spill}",
    )
    process = runs.start(*settings, fault="update.before@0=raise")
    process.wait(300)
    assert process.returncode != 0
    runs.wait_for_workers_to_end()
    spilled = {path.name.split("-")[1] for path in spill.rglob("*.arrow")}
    assert spilled == {"rollout", "reward", "reference", "advantage"}
    shutil.rmtree(tmp_path / "shm")
    runs.train(*settings)
    again = {(0, stage) for stage in ("rollout", "reward", "reference", "advantage")}
    assert sorted(each for each in runs.executed("started") if each in again) == sorted(again)
    runs.wait_for_workers_to_end()
    deadline = time.monotonic() + 60
    while (left := list(spill.rglob("*.arrow"))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
    assert runs.shared_memory() == []
