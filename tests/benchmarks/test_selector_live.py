"""What the selector's live benchmarks make of measurements, without measuring anything."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.selector_live import LIVE, compare, growths, report
from benchmarks.selector_live_replay import STAGES, Policy, World, follow, growth, least_path
from benchmarks.selector_live_table import (
    Cell,
    LiveTable,
    Surface,
    Switch,
    Truth,
    from_a,
    from_b,
    in_turns,
    together,
)
from earl_core.deployment.shapes import Hardware, ModelShape
from earl_core.deployment.stage_deployment import StageDeployment

ONE, TWO = StageDeployment("rollout", 1, 1, threads=2), StageDeployment("rollout", 2, 1, threads=1)
SMALL, LARGE = (
    StageDeployment("update", threads=2, max_tokens_per_microbatch=size) for size in (1024, 4096)
)
MODEL = ModelShape(
    model_type="llama", hidden_size=256, layers=4, attention_heads=4, key_value_heads=2,
    intermediate_size=768, vocabulary=2048, max_positions=4160, tied_embeddings=True,
)  # fmt: skip
CONTEXTS, COUNTS = (128, 1024), (4, 16)


def made(noise: float = 1.0, fits: int = 10**9) -> LiveTable:
    """One engine wins at short contexts, two at long ones; the large budget wins, but has memory
    for contexts below `fits` only. noise: set B over set A."""
    hardware = Hardware(cpu_cores=2, memory_bytes=16 * 2**30)
    table = LiveTable(MODEL, hardware, 4160, reshards=[0.1, 0.1, 0.2])
    for context, count in itertools.product(CONTEXTS, COUNTS):
        for layout, rate in ((ONE, 200.0), (TWO, 200.0 * math.sqrt(context / 362) / 2)):
            rate *= count / 16 / (1 + context / 2048)
            cell = Cell(
                "torch", layout, context, count // layout.replicas, (rate,), (rate * noise,)
            )
            table.cells.append(cell)
        for layout, rate in ((SMALL, 300.0), (LARGE, 400.0)):
            dead = layout == LARGE and context >= fits
            sets = ((), ()) if dead else ((rate,), (rate * noise,))
            table.cells.append(Cell("", layout, context, count, *sets, peak=1e9))
    table.switches = [Switch("torch", layout, 0.2, 0.1) for layout in (ONE, TWO)]
    return table


def world(table: LiveTable, responses: int = 16, iterations: int = 16) -> World:
    # Neither was measured.
    resting = ("update.logits_chunk_tokens", "update.activation_checkpointing")
    run = growth("torch", *CONTEXTS, iterations, responses)
    return World(table, run, fixed_fields=resting)


def test_a_surface_is_exact_where_measured_and_geometric_between() -> None:
    surface = Surface({(128, 4): 100.0, (512, 4): 400.0, (512, 16): 900.0})
    assert surface(128, 4) == pytest.approx(100)
    assert surface(256, 4) == pytest.approx(200)
    assert surface(512, 8) == pytest.approx(600)
    assert surface(64, 2) == pytest.approx(100)
    assert surface(4096, 64) == pytest.approx(900)


def test_sets_and_layouts_take_turns() -> None:
    order: list[StageDeployment] = []

    def work(layout: StageDeployment, rate: float) -> tuple[float, float]:
        order.append(layout)
        return rate + len(order), 10.0 * len(order)

    found = in_turns({ONE: lambda: work(ONE, 0), TWO: lambda: work(TWO, 100)}, 2)
    assert order == [ONE, TWO, ONE, TWO, TWO, ONE, TWO, ONE]
    assert found[ONE] == ((1, 6), (3, 8), 80.0)
    assert found[TWO] == ((102, 105), (104, 107), 70.0)


def test_a_layout_without_memory_has_no_rates_and_is_asked_once() -> None:
    asked = []
    found = in_turns({ONE: lambda: asked.append(1), TWO: lambda: (2.0, 1.0)}, 3)
    assert len(asked) == 1
    assert found[ONE] == ((), (), 0.0)
    assert found[TWO][0] == (2.0, 2.0, 2.0)


def test_when_time_is_over_each_layout_still_has_both_sets() -> None:
    found = in_turns({ONE: lambda: (1.0, 1.0), TWO: lambda: (2.0, 1.0)}, 5, until=0.0)
    assert found[ONE][:2] == ((1.0,), (1.0,))
    assert found[TWO][:2] == ((2.0,), (2.0,))


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    table = made(1.1, fits=1024)
    table.write(tmp_path / "table.json")
    assert LiveTable.read(tmp_path / "table.json") == table


def test_budgets_that_cut_alike_are_one() -> None:
    truth = Truth(made(), "torch", from_a)
    other = SMALL._replace(max_tokens_per_microbatch=1100)
    assert together(other, 512, 16) == together(SMALL, 512, 16) == 2
    assert truth.seconds(other, 512, 16) == truth.seconds(SMALL, 512, 16)
    assert truth.seconds(SMALL, 512, 16) == pytest.approx(16 * 512 / 300)


def test_memory_ends_between_what_fitted_and_what_did_not() -> None:
    truth = Truth(made(fits=1024), "torch", from_b)
    middle = math.sqrt(128 * 1024)
    assert math.isfinite(truth.seconds(LARGE, middle - 1, 16))
    assert math.isinf(truth.seconds(LARGE, middle + 1, 16))
    assert math.isfinite(truth.seconds(SMALL, 4096, 16))


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_no_path_is_shorter_than_the_least_one(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 3))
    numbers = st.lists(st.floats(0, 10), min_size=count, max_size=count)
    seconds = data.draw(st.lists(numbers, min_size=1, max_size=4))
    costs = data.draw(st.lists(numbers, min_size=count, max_size=count))

    def total(path: tuple[int, ...]) -> float:
        moved = sum(costs[a][b] for a, b in itertools.pairwise(path))
        return sum(row[option] for row, option in zip(seconds, path, strict=True)) + moved

    every = itertools.product(range(count), repeat=len(seconds))
    assert total(tuple(least_path(seconds, costs))) == pytest.approx(min(map(total, every)))


def test_hindsight_beats_everything_and_the_floor_is_its_equal_without_noise() -> None:
    for run in growths(made(), 16):
        found = compare(made(), run)
        others = [course.total for course in found.policies.values()] + [found.fixed[0][0]]
        assert found.best.total <= min(others) + 1e-9
        assert found.floor.total == pytest.approx(found.best.total)


def test_live_tokens_follows_the_growth() -> None:
    found = follow(world(made()), LIVE)
    assert found.layouts["rollout"][0] == ONE
    assert found.layouts["rollout"][-1] == TWO
    assert found.switches("rollout") == 1
    assert set(found.layouts["update"]) == {LARGE}
    assert found.failures == 0


def test_a_policy_never_learns_from_set_b() -> None:
    plain, noisy = (follow(world(made(noise)), LIVE) for noise in (1.0, 1.5))
    assert plain.layouts == noisy.layouts
    stages = {stage: plain.layouts[stage] for stage in STAGES}
    assert all(len(path) == 16 for path in stages.values())
    assert noisy.total < plain.total


def test_where_memory_ends_fixed_choices_end_and_live_tokens_goes_on() -> None:
    grown = world(made(fits=1024))
    lasting = {update for seconds, _, update in grown.fixed() if math.isfinite(seconds)}
    assert lasting == {SMALL}
    found = follow(grown, Policy("live_tokens", "live_tokens", observes=True))
    assert math.isfinite(found.total)
    assert found.layouts["update"][0] == LARGE
    assert found.layouts["update"][-1] == SMALL
    assert found.failures <= 1


def test_the_report_has_every_run_and_its_headline() -> None:
    written = report(made(1.02), 8)
    assert len(written.rows) == len(made().cells)
    assert written.headline["noise_floor"] == pytest.approx(0, abs=1e-9)
    assert written.headline["live_regret"] >= 0
    assert sum("responses" in note and "hindsight" in note for note in written.notes) == 2


def test_the_story_of_a_gpu_names_what_ran_out_of_memory() -> None:
    from benchmarks.gpu.selector_single import row_of
    from benchmarks.gpu.selector_story import story

    table = made(fits=1024)
    found = story(world(table))
    assert found.dead == pytest.approx(0.5)
    assert found.failures <= 1
    assert "fixed choices run out of memory, at" in found.note
    dead = next(cell for cell in table.cells if not cell.a)
    row = row_of(table, dead)
    assert row["note"] == "out of memory"
    assert row["tokens/s A"] is None
