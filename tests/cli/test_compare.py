"""`earl compare` and `earl bisect`: a page in a browser, bad input, rows in shared memory."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from playwright.sync_api import Browser, sync_playwright

from earl_core.comparison import bisect, recorded_runs
from earl_core.config import parse_config
from earl_core.run import RunDirectory
from earl_core.run.episodes import write_episodes
from earl_core.run.record import RunDamaged
from earl_core.system.errors import ConfigError
from earl_core.trajectory.samples import Episode
from flows.cli.bisecting import bisect_runs
from flows.cli.comparing import compare_runs
from tasks.reports.compare_page import page
from tasks.reports.intervals import half_interval
from tests.cli.test_report import ARGUMENTS, CHROMIUM, HOSTILE, SECRET, Reader, config, sealed
from tests.flows.planting import flip_a_mask
from tests.kept import game, seal_episodes


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


def opened(directory: Path, name: str, **changes: Any) -> RunDirectory:
    run = RunDirectory.open(parse_config(config(directory, name=name, **changes)))
    run.store_config()
    return run


def said(number: int, text: str, won: float) -> Episode:
    """A game whose first answer and reward are these."""
    episode = game(number)
    episode.samples[0].texts[1] = text
    episode.samples[0].turn_rewards[-1] = won
    return episode


def measured(run: RunDirectory, mean: float, episodes: list[Episode]) -> None:
    """Two iterations, an evaluation and the kept episodes of the first."""
    for iteration in range(2):
        run.append_metrics(
            iteration,
            {
                "rollout/return/mean": mean + iteration,
                "rollout/return/std": 0.5,
                "rollout/episodes": 16.0,
                "rollout/stage_seconds": 2.0 + iteration,
                "update/grad_norm": mean,
            },
        )
    scores = {"return/mean": mean, "return/std": 1.0, "episodes": 64.0}
    shares = {"outcome/win/share": 0.5, "outcome/win/low": 0.4, "outcome/win/high": 0.6}
    sealed(run, 0, "evaluation", metrics={**scores, **shares})
    write_episodes(run.episodes_path(0), run.stores, *seal_episodes(run, 0, [episodes]))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of three runs: `a`, `b`, and `empty`, which has done nothing."""
    monkeypatch.setenv("EARL_TEST_PASSWORD", SECRET)
    a, b = opened(tmp_path, "a"), opened(tmp_path, "b", update={"learning_rate": 0.5})
    measured(a, 0.25, [said(0, HOSTILE[0], 1.0), said(1, HOSTILE[2], 0.5)])
    measured(b, -0.5, [said(0, f"it is {SECRET}", -1.0)])
    empty = opened(tmp_path, "empty")
    for run in (a, b, empty):
        run.close()
    yield tmp_path / "runs"
    shutil.rmtree(tmp_path / "shards", ignore_errors=True)


def test_intervals_of_few_numbers_are_students() -> None:
    for count in (2, 3, 4, 6, 16, 256):
        values = np.random.default_rng(count).normal(size=count)
        exact = scipy.stats.t.ppf(0.975, count - 1) * scipy.stats.sem(values)
        assert half_interval(values.std(), count) == pytest.approx(exact, rel=2e-3)
    assert half_interval(0.0, 1) is None


@pytest.mark.skipif(not Path(CHROMIUM).exists(), reason="read in Debian's Chromium")
def test_runs_are_put_side_by_side(
    browser: Browser, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = runs / "page.html"
    compare_runs(["a", "b"], str(runs), file, prompts=1)
    shown = capsys.readouterr().out
    assert SECRET not in shown + file.read_text()
    assert "+0.250 ± 0.252" in shown
    assert "50 (40-60)" in shown
    assert "2.50 ± 6.35" in shown
    assert "Episodes of an equal prompt" in shown
    assert "1 equal prompt" in shown

    reader = Reader(browser, file, viewport={"width": 1400, "height": 900})
    assert reader.page.title() == "Runs a, b"
    assert reader.texts("#facts tbody td:first-child") == ["a", "b"]
    name, one, other = reader.texts("#settings-that-differ tbody td")
    assert (name, float(one) < 0.5, other) == ("update.learning_rate", True, "0.5")
    titles = reader.texts("figure h3")
    assert {"Return", "Outcome: win", "Seconds by stage", "Gradient"} <= {*titles}
    reader.draw_all()
    legends = reader.texts("figure:first-of-type .legendtext")
    assert {"a", "a, held out", "b", "b, held out"} <= {*legends}
    assert reader.texts("#stages tbody td") == ["rollout", "2.50 ± 6.35", "2.50 ± 6.35"]
    assert reader.texts("#rows tbody td") == ["board 1", "0.75", "-1", "1.75"]
    columns = reader.page.locator("#side-by-side article")
    assert columns.count() == 2
    assert reader.texts("#side-by-side article:first-child .model pre")[0] == HOSTILE[0]
    assert reader.texts("#side-by-side article:last-child .model pre")[0] == "it is (hidden)"
    columns.first.get_by_role("button", name="Next").click()
    assert reader.texts("#side-by-side article:first-child .model pre")[0] == HOSTILE[2]
    boxes = [columns.nth(number).bounding_box() for number in range(2)]
    assert boxes[0]["y"] == boxes[1]["y"]
    reader.close()

    narrow = Reader(browser, file, viewport={"width": 400, "height": 800}, color_scheme="dark")
    narrow.draw_all()
    boxes = [narrow.page.locator(".episode").nth(number).bounding_box() for number in range(2)]
    assert boxes[0]["x"] == boxes[1]["x"]
    narrow.close()


def test_many_runs_no_numbers_long_texts_and_texts_that_steer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "_MOST_CHARACTERS", 1000)
    for number in range(10):
        run = opened(tmp_path, f"r{number}")
        other = said(1, "short", 0.0)
        other.samples[0].texts[0] = "board 9"
        measured(run, 0.5, [said(0, "\x1b[2J" + "long" * 30, number), other])
        run.append_metrics(2, {"rollout/return/mean": math.nan, "update/grad_norm": math.inf})
        run.close()
    compare_runs([f"r{n}" for n in range(10)], str(tmp_path / "runs"), tmp_path / "p.html", 2)
    shown = capsys.readouterr().out
    assert "@ r7   a r8   b r9" in shown
    assert "\N{REPLACEMENT CHARACTER}[2Jlong" in shown
    assert "\x1b" not in shown
    # The one that was farthest apart has no room, and the others are shown without it.
    assert ", 1 equal prompt;" in shown
    shutil.rmtree(tmp_path / "shards", ignore_errors=True)


def test_bad_input_is_refused_in_a_sentence(runs: Path) -> None:
    other = runs / "other"
    shutil.copytree(runs / "a", other)
    record = json.loads((other / "run.json").read_text())
    (other / "run.json").write_text(json.dumps({**record, "format": "earl.run/3"}))
    refused = {
        ("a",): "needs two runs or more",
        ("a", "nobody"): "there is no run 'nobody'",
        ("a", str(runs / "a")): "is given twice",
        ("a", "b", "a"): "is given twice",
        ("a", "empty"): "have no metric in common, for empty has finished no iteration",
    }
    for names, sentence in refused.items():
        with pytest.raises(ConfigError, match=sentence) as found:
            compare_runs(names, str(runs), runs / "page.html", prompts=1)
        assert found.value.exit_code == 2
    for command in (
        lambda: compare_runs(["a", "other"], str(runs), runs / "page.html", prompts=1),
        lambda: bisect_runs("a", "other", str(runs), as_json=False),
    ):
        with pytest.raises(RunDamaged, match=r"has the format earl\.run/3"):
            command()
    assert not (runs / "page.html").exists()
    with pytest.raises(ConfigError, match="sealed no stage of the same iteration"):
        bisect_runs("a", "empty", str(runs), as_json=False)
    with pytest.raises(ConfigError, match="cannot be written"):
        compare_runs(["a", "b"], str(runs), runs, prompts=0)


def test_bisect_prints_rows_of_shared_memory(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bisect_runs("a", "b", str(runs), as_json=True)
    found = json.loads(capsys.readouterr().out)["difference"]
    assert (found["stage"], found["source"]) == ("rollout", "shards")
    assert found["rows"]["missing"] == [[1 << 16], []]
    assert found["rows"]["columns"] == {"turn_rewards": 1, "texts": 1}
    assert SECRET not in json.dumps(found)
    bisect_runs("a", "b", str(runs), as_json=False)
    shown = capsys.readouterr().out
    assert "First difference: rollout of iteration 0" in shown
    assert "setting update.learning_rate" in shown


def test_a_flipped_bit_of_a_shard_and_another_deal_are_told_apart(tmp_path: Path) -> None:
    names = ("one", "flipped", "dealt")
    deals = ([[game(0), game(1)]], [[game(0), game(1)]], [[game(0)], [game(1)]])
    opens = [opened(tmp_path, name) for name in names]
    rollouts = [seal_episodes(run, 0, deal)[0] for run, deal in zip(opens, deals, strict=True)]
    flip_a_mask(opens[1], rollouts[1])
    one, flipped, dealt = recorded_runs([run.path for run in opens])
    found = bisect(one, flipped)
    assert found.difference is None
    damaged, changed = found.damage
    assert damaged.startswith("flipped: the shard")
    assert "shards differ, first in column loss_mask of sample 0" in changed

    same = bisect(one, dealt)
    assert (same.difference, same.damage) == (None, [])
    (note,) = same.notes
    assert note.endswith("1 → 2 shards, and the rows are equal in the shards")

    for run in opens:
        run.close()
    shutil.rmtree(tmp_path / "shards")
    gone = bisect(one, dealt)
    assert gone.notes[0].endswith("its rows are gone")


def test_numbers_are_compared_bit_by_bit() -> None:
    import pyarrow as pa

    from earl_core.comparison.rows import compare_rows

    def table(values: list[float]) -> pa.Table:
        column = pa.array([values, [1.0]], pa.large_list(pa.float32()))
        return pa.table({"sample_id": pa.array([0, 1], pa.int64()), "x": column})

    assert compare_rows(table([np.nan, 0.0]), table([np.nan, 0.0])).equal
    (row,) = compare_rows(table([np.nan, 0.0]), table([np.nan, -0.0])).rows
    assert (row.cells[0].place, row.cells[0].one, row.cells[0].other) == (1, "0.0", "-0.0")
