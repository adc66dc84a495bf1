"""Which point is measured next: nothing twice, within the time, the same every time, to an end."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given as examples
from hypothesis import settings
from hypothesis import strategies as st

from earl_core.config.rollout import RolloutConfig
from earl_core.config.update import UpdateConfig
from earl_core.deployment.shapes import Hardware, ModelShape
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.selector.choice.selection import SelectionInput
from earl_core.selector.held_out import held_out_errors, profile_peaks
from earl_core.selector.profile.profile_table import ProfilePoint, ProfileTable, key_of
from earl_core.selector.profile_planner import (
    Grid,
    Point,
    grid_of,
    next_point,
    workers_of,
)
from tests.selector.examples import given as run_given

SHAPE = ModelShape(
    model_type="llama",
    hidden_size=256,
    layers=4,
    attention_heads=4,
    key_value_heads=4,
    vocabulary=4096,
    max_positions=4096,
    intermediate_size=512,
)


def cpu_host(cores: int = 2, memory_gib: int = 64, **changes: object) -> SelectionInput:
    """A small model on a host without GPUs; several layouts of each stage."""
    values: dict[str, object] = {
        "iteration": 0,
        "rollout": RolloutConfig(
            engine="torch",
            prompts_per_iteration=8,
            group_size=4,
            max_turns=4,
            max_tokens_per_turn=64,
            dtype="float32",
        ),
        "update": UpdateConfig(precision="fp32", max_tokens_per_microbatch=2048),
        "needs_reference": False,
        "hardware": Hardware(cpu_cores=cores, memory_bytes=memory_gib * 2**30),
        "model": SHAPE,
    }
    return SelectionInput(**{**values, **changes})  # type: ignore[arg-type]


GRID = Grid(contexts=(256, 1024, 4096), episodes=(1, 4, 16, 32))


def measured(point: Point, speed: float) -> ProfilePoint:
    """What a machine that is `speed` times as fast as some fixed figure would show."""
    layout = point.candidate
    rate = (
        speed
        * 1000
        / (1 + math.log2(point.context))
        * (1 + 0.1 * layout.max_tokens_per_microbatch / 2048)
    )
    return ProfilePoint(
        key=key_of(layout),
        context=point.context,
        requests=point.requests,
        tokens_per_second=rate,
        peak_bytes=1e9 + point.context * point.requests,
    )


def survey(
    given: SelectionInput, seconds: float, speed: float = 1.0, start: float = 5.0
) -> tuple[list[Point], ProfileTable, float]:
    """A whole survey on a machine where each point takes as long as predicted."""
    table, running, points, left = ProfileTable(), None, [], seconds
    while (
        point := next_point(given, GRID, table, left, running=running, costs=lambda stage: start)
    ) is not None:
        points.append(point)
        table = table.observe(measured(point, speed), 16)
        running, left = point.candidate, left - point.seconds
        assert len(points) < 2000, "it does not end"
    return points, table, left


@settings(max_examples=12)
@examples(seconds=st.floats(0.0, 120.0), speed=st.floats(0.1, 30.0))
def test_no_point_twice_within_the_time_and_the_same_again(seconds: float, speed: float) -> None:
    points, table, left = survey(cpu_host(), seconds, speed)
    assert left >= 0
    places = [point.place for point in points]
    assert len(set(places)) == len(places) == len(table.points)
    assert all(point.context in GRID.contexts for point in points)
    again, _, _ = survey(cpu_host(), seconds, speed)
    assert again == points


@settings(max_examples=4)
@examples(cut=st.integers(0, 12))
def test_a_survey_that_was_cut_off_goes_on_with_what_is_left(cut: int) -> None:
    given, seconds = cpu_host(), 1000.0
    table = ProfileTable()
    for _ in range(cut):
        point = next_point(given, GRID, table, seconds)
        if point is None:
            break
        table = table.observe(measured(point, 1.0), 16)
    rest, done = set(), {point.bucket for point in table.points}
    while (point := next_point(given, GRID, table, seconds)) is not None:
        rest.add(point.place)
        table = table.observe(measured(point, 1.0), 16)
    assert not rest & done
    assert next_point(given, GRID, table, math.inf) is None


def test_every_stage_with_a_choice_is_measured_and_starts_are_shared() -> None:
    # Points take a second or two.
    points, _, _ = survey(cpu_host(), 3600.0, speed=30.0, start=30.0)
    stages = {point.candidate.stage for point in points}
    assert stages == {"rollout", "update"}
    assert {p.candidate.replicas for p in points if p.candidate.stage == "rollout"} == {1, 2}
    assert len({key_of(p.candidate) for p in points if p.candidate.stage == "update"}) > 3
    changes = sum(
        workers_of(a.candidate) != workers_of(b.candidate) for a, b in itertools.pairwise(points)
    )
    assert changes < len(points) / 4
    scoring, _, _ = survey(cpu_host(needs_reference=True), 3600.0)
    assert {p.candidate.stage for p in scoring} == {"rollout", "update", "reference"}


def test_rivals_come_before_layouts_that_are_far_behind() -> None:
    """Once one engine is known to be twice as fast, the other need not be asked everywhere."""
    given = cpu_host()
    one, two = StageDeployment("rollout", 1, threads=2), StageDeployment("rollout", 2)
    table = ProfileTable()
    for layout, rate in ((one, 4000.0), (two, 200.0)):
        for requests in (1.0, 4.0, 16.0, 32.0):
            for context in GRID.contexts:
                point = ProfilePoint(
                    key=key_of(layout),
                    context=context,
                    requests=requests,
                    tokens_per_second=rate * requests / 32,
                )
                table = table.observe(point, 16)
    found = next_point(given, GRID, table, math.inf)
    assert found is not None
    assert found.candidate.stage == "update"


def dear(stage: str) -> float:
    return 1000.0


def test_running_workers_are_preferred_to_starting_others() -> None:
    given, table = cpu_host(), ProfileTable()
    first = next_point(given, GRID, table, math.inf, costs=dear)
    assert first is not None
    table = table.observe(measured(first, 1.0), 16)
    then = next_point(given, GRID, table, 2000.0, running=first.candidate, costs=dear)
    assert then is not None
    assert workers_of(then.candidate) == workers_of(first.candidate)
    assert then.seconds < 1000.0
    # With the time left not even the start of any fits.
    assert next_point(given, GRID, table, 999.0, costs=dear) is None


def test_what_ran_out_of_memory_is_not_asked_again_nor_anything_larger() -> None:
    given = cpu_host()
    points, _, _ = survey(given, 3600.0)
    failing = next(p for p in points if p.candidate.stage == "update" and p.context == 1024)
    failed = measured(failing, 1.0).model_copy(
        update={"out_of_memory": True, "tokens_per_second": 0.0}
    )
    table = ProfileTable().observe(failed, 16)
    while (point := next_point(given, GRID, table, math.inf)) is not None:
        assert key_of(point.candidate) != key_of(failing.candidate) or point.context < 1024
        table = table.observe(measured(point, 1.0), 16)


def test_skipped_places_and_layouts_beyond_the_memory_are_left_out() -> None:
    given = cpu_host()
    first = next_point(given, GRID, ProfileTable(), math.inf)
    assert first is not None
    other = next_point(given, GRID, ProfileTable(), math.inf, skipped={first.place})
    assert other is not None
    assert other.place != first.place
    # A quarter of a GiB holds not even an idle process.
    tight = cpu_host(hardware=Hardware(cpu_cores=2, memory_bytes=2**28))
    assert next_point(tight, GRID, ProfileTable(), math.inf) is None


def test_grid_follows_configuration_and_question() -> None:
    given = cpu_host()
    grid = grid_of(given)
    assert grid.contexts == (64, 128, 256, 512, 1024, 2048, 4096)
    assert grid.episodes == (1, 2, 4, 8, 16, 32)
    assert grid_of(given, 1000).contexts == (64, 128, 256, 512)
    assert grid_of(given, 10**9).contexts == grid.contexts
    assert grid_of(given, 16).contexts == (16,)


def test_gpus_are_surveyed_too() -> None:
    """Hundreds of layouts; engines on devices of their own count once."""
    given = run_given(model="smollm2-135m", gpus=4, episodes=16)
    point = next_point(given, Grid(contexts=(1024,), episodes=(16,)), ProfileTable(), math.inf)
    assert point is not None
    assert point.seconds > 0


def test_held_out_error_is_nothing_when_the_formula_is_right_up_to_a_line() -> None:
    given = cpu_host()
    _, table, _ = survey(given, 600.0)
    exact = [
        point.model_copy(update={"peak_bytes": 5e8 + 1.5 * peak.predicted})
        for point, peak in zip(table.points, profile_peaks(given, table), strict=True)
    ]
    lined = ProfileTable(points=tuple(exact))
    errors = {error.stage: error for error in held_out_errors(given, lined)}
    assert set(errors) == {"rollout", "update"}
    assert errors["update"].median == pytest.approx(0.0, abs=1e-6)
    assert errors["update"].well > 0.9
    assert errors["update"].formula > 0.3
    assert held_out_errors(given, ProfileTable(points=table.points[:2])) == []
