"""What a run shares of its measurements, and what becomes of the run where it cannot."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from earl_core.control.learnt_profile import LearntProfile, RunHistory
from earl_core.deployment.plan import DeploymentPlan
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


def seen(iteration: int, kind: str = "measured") -> Observation:
    return Observation(
        iteration=iteration,
        stage="update",
        kind=kind,
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


def test_what_divided_the_devices_anew_is_known_to_those_that_run_ahead() -> None:
    """Staleness 2: the choice of iteration 6 begins when iteration 3 has ended."""
    plans = {4: 0, 5: 1}

    def plan(iteration: int) -> DeploymentPlan | None:
        anew = plans.get(iteration)
        if anew is None:
            return None
        return DeploymentPlan(iteration=iteration, stages={}, reasons={}, divided_anew=anew)

    run: Any = SimpleNamespace(
        observations=SimpleNamespace(
            read=lambda: [
                seen(each, kind).model_dump(mode="json")
                for each in range(8)
                for kind in ("measured", "out_of_memory")
            ]
        ),
        config=SimpleNamespace(schedule=SimpleNamespace(staleness=2)),
        plan=plan,
    )
    history = RunHistory(run)

    def known(iteration: int) -> list[int]:
        return [each.iteration for each in history.known_to(iteration)]

    assert history.divided_anew(6) == {5: 1}
    # Of iteration 5, which goes on meanwhile, only the reason.
    assert known(6) == [0, 0, 1, 1, 2, 2, 3, 3, 5, 6, 6]
    # Its own choice, and those for which it has ended, go by what they went by before.
    assert history.divided_anew(5) == {}
    assert known(5) == [0, 0, 1, 1, 2, 2, 5, 5]
    assert history.divided_anew(8) == {}
    assert known(8) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
