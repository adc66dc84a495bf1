"""Whole runs that leave `selector.policy` to EARL."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path

import yaml

from earl_core.config import load_config
from earl_core.control.hardware import read_hardware
from earl_core.control.machine_profile import profile_of
from earl_core.pretrained.model_directory import read_model_shape
from earl_core.run.record import read_record
from earl_core.selector.profile.profile_table import ProfilePoint, ProfileTable, write_table
from tests.flows.runs import LEARNING, Runs
from tests.flows.test_divided import STAYING
from tests.flows.test_overlap import intervals
from tests.flows.test_selector_runs import plan


def hold(runs: Runs, gate: Path) -> None:
    """The first update, until the second rollout has begun, or for so long that it never will."""
    deadline = time.monotonic() + 300
    while (1, "rollout") not in runs.executed("started", "loose") and time.monotonic() < deadline:
        time.sleep(0.05)
    gate.unlink()


def test_a_run_says_who_lays_it_out_and_goes_on_so(runs: Runs) -> None:
    """First with given threads; then with open ones, on cores whose engines were measured; and
    then again without what was measured. What it divides overlaps."""
    directory = runs.directory / "profiles"
    selector = f"selector={json.dumps({'profile_directory': str(directory)})}"
    stale = ["schedule.staleness=1", "algorithm.importance_correction={}", "iterations=2"]
    loose = [*LEARNING, *stale, "rollout.threads=0", "update.threads=0", selector]
    given = load_config(runs.config, loose)
    _, mark, _ = profile_of(given, read_hardware(), read_model_shape(runs.model))
    place = {"context": 42.0, "requests": 32.0, "tokens_per_second": 5000.0, "weight": 4.0}
    keys = "rollout tp1 1x2threads", "rollout tp1"
    points = (*(ProfilePoint(key=key, **place) for key in keys), *STAYING)
    write_table(directory, mark, ProfileTable(points=points))

    gate = runs.directory / "gate"
    gate.touch()
    runs.environment["EARL_FAULT_GATE"] = str(gate)
    threading.Thread(target=hold, args=(runs, gate), daemon=True).start()
    assert runs.train_here(
        {"overrides": ["iterations=1"]},
        {"overrides": ["name=loose", *loose], "fault": "update.step0@0=wait"},
    ) == [None, None]
    said = runs.output_path(0).read_text()
    exact = "the torch engine in fp32 with given threads is to give equal bits"
    assert f"selector.policy fixed: {exact}" in said
    assert plan(runs, 0).policy == "fixed"
    assert plan(runs, 0).reasons["policy"] == f"auto: {exact}"
    assert read_record(runs.run())["selector"] == {"auto": "fixed", "why": exact}

    times = [intervals(runs, stage, "loose") for stage in ("rollout", "update")]
    assert times[0][1][0] < times[1][0][1], "the second rollout has waited for the first update"

    shutil.rmtree(directory)
    assert runs.train_here({"overrides": ["name=loose", *loose, "iterations=3"]}) == [None]
    text = "cores to lay the stages out on"
    assert text in said
    assert "selector.policy live_tokens: as the run began" in runs.output_path(1).read_text()
    written = yaml.safe_load((runs.run("loose") / "config.yaml").read_text())
    assert written["selector"]["policy"] == "live_tokens"
    for iteration in range(3):
        sealed = runs.run("loose") / "iterations" / f"{iteration:06d}" / "select.json"
        chosen = json.loads(sealed.read_text())["outputs"]["plan"]
        assert chosen["policy"] == "live_tokens"
        assert text in chosen["reasons"]["policy"]
    assert runs.shared_memory() == []
