"""What a run shares of its measurements, and what becomes of the run where it cannot."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from earl_core.control.learnt_profile import LearntProfile
from earl_core.deployment.shapes import Hardware
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.selector.profile.observations import Observation
from earl_core.selector.profile.profile_table import (
    ProfileTable,
    only_writer,
    read_table,
    table_path,
)

MARK = "0123456789abcdef"
HOST = Hardware(cpu_cores=1, memory_bytes=2**30)


class Run(SimpleNamespace):
    """The record of a run directory."""

    def __init__(self) -> None:
        super().__init__(record={})

    def update_record(self, **known: Any) -> None:
        self.record.update(known)


def seen(iteration: int) -> Observation:
    return Observation(
        iteration=iteration,
        stage="update",
        kind="measured",
        deployment=StageDeployment(stage="update", max_tokens_per_microbatch=1024),
        context=512.0,
        requests=8.0,
        tokens_per_second=100.0,
        peak_bytes=1e9,
    )


def learnt(run: Any, directory: Path) -> LearntProfile:
    return LearntProfile(run, directory, MARK, ProfileTable(), 16.0)


def test_a_measurement_is_shared_once(tmp_path: Path) -> None:
    run, observed = Run(), [seen(0)]
    learnt(run, tmp_path).share(observed, HOST)
    learnt(run, tmp_path).share(observed, HOST)
    (point,) = read_table(tmp_path, MARK).points
    assert point.weight == 1.0
    with only_writer(tmp_path, MARK):
        learnt(run, tmp_path).share([*observed, seen(1)], HOST)
    assert read_table(tmp_path, MARK).points == (point,)


def test_a_run_outlives_a_profile_that_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file in the directory's place: permissions do not stop root, who may run the tests."""
    run, directory = Run(), tmp_path / "profiles"
    directory.write_bytes(b"")
    profile = learnt(run, directory)
    with caplog.at_level(logging.WARNING, "earl_core.control.learnt_profile"):
        for iteration in range(3):
            profile.share([seen(number) for number in range(iteration + 1)], HOST)
    (warning,) = caplog.messages
    assert str(directory) in warning
    directory.unlink()
    # What could not be shared is when it can.
    profile.share([seen(number) for number in range(4)], HOST)
    (point,) = read_table(directory, MARK).points
    assert point.iteration == 3
    assert point.weight > 3


def test_a_run_outlives_a_profile_that_is_damaged_meanwhile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table_path(tmp_path, MARK).write_bytes(b"PAR1 nonsense")
    profile = learnt(Run(), tmp_path)
    with caplog.at_level(logging.WARNING, "earl_core.control.learnt_profile"):
        profile.share([seen(0)], HOST)
    assert "remove it to measure again" in caplog.text
    assert table_path(tmp_path, MARK).read_bytes() == b"PAR1 nonsense"


def test_a_choice_goes_by_the_iterations_that_it_knows_only(tmp_path: Path) -> None:
    profile, early = learnt(Run(), tmp_path), [seen(0), seen(1)]
    first = profile.table(early, HOST, early)
    assert first.points
    later = [*early, seen(2), seen(3)]
    assert profile.table(later, HOST, early) == first
    profile.share(later, HOST)
    assert profile.table(later, HOST, early) == first
    every = profile.table(later, HOST, later)
    assert every == learnt(Run(), tmp_path / "other").table(later, HOST) != first
    assert profile.table(later, HOST, early) == first
