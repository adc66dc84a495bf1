"""Where a run goes on: the iteration, the stage, and the checkpoint of its newest policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from earl_core.control.resume_point import StateLost, is_updated, resume_point, saved_state
from earl_core.run import RunDirectory
from tests.durability.life import write_checkpoint
from tests.run.test_run_directory import config_in, seal


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.open(config_in(tmp_path))


def checkpoint(run: RunDirectory, iteration: int, key: str) -> Path:
    path = run.checkpoint_path(iteration)
    write_checkpoint(path, "weights", iteration + 1, key)
    return path.resolve()


def test_a_run_goes_on_where_its_directory_says(run: RunDirectory) -> None:
    assert resume_point(run) == (0, "select", None)
    for stage in ("select", "rollout"):
        seal(run, 0, stage, "k")
    assert resume_point(run) == (0, "reward", None), "without a penalty there is no reference"
    for stage in ("reward", "advantage"):
        seal(run, 0, stage, "k")
    written = checkpoint(run, 0, "key")
    # Without its seal a checkpoint is nobody's.
    assert resume_point(run) == (0, "update", None)
    seal(run, 0, "update", "another")
    assert resume_point(run) == (0, "publish", None)
    assert not is_updated(run, 0)
    with pytest.raises(StateLost, match="policy version 1"):
        saved_state(run, 1)
    seal(run, 0, "update", "key")
    assert is_updated(run, 0, checksums=True)
    assert resume_point(run) == (0, "publish", written)
    assert saved_state(run, 1) == written
    run.mark_stable(0)
    assert resume_point(run) == (1, "select", written)
    assert saved_state(run, 0) is None


def test_what_only_a_live_learner_has_is_not_on_disk(run: RunDirectory) -> None:
    covered = checkpoint(run, 0, "key")
    run.mark_stable(0)
    # Iterations 1 and 2 were finished without a checkpoint.
    assert resume_point(run, finished=2) == (3, "select", covered)
    assert resume_point(run) == (1, "select", covered)
    with pytest.raises(StateLost):
        saved_state(run, 3)


@pytest.mark.parametrize("checksums", [False, True])
def test_a_damaged_checkpoint_is_named_and_not_taken(run: RunDirectory, checksums: bool) -> None:
    weights = checkpoint(run, 0, "key") / "policy" / "weights"
    seal(run, 0, "update", "key")
    weights.write_text("weight_" if checksums else "cut")
    assert is_updated(run, 0) == checksums
    assert not is_updated(run, 0, checksums=True)
    assert "not usable" in run.ledger()[-1]["event"]
