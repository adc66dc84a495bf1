"""Runs under different layouts learn the same: one rank, meshes of two, a change in the middle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from earl_core.config import ConfigError, load_config
from earl_core.selector import Hardware
from flows.cli.training import preflight
from tests.flows.runs import Runs

LENGTH = 4
SETTINGS = (
    f"iterations={LENGTH}",
    "algorithm.kl={placement: none, coefficient: 0}",
    "rollout.prompts_per_iteration=8",
    "update.max_tokens_per_microbatch=256",
)

LAYOUTS = {
    "dp": ["layout.update.replicate=2"],
    "shard": ["layout.update.shard=2"],
    "tp": ["layout.update.tensor_parallel=2"],
    "cp": ["layout.update.context_parallel=2"],
    "mesh change": [
        "layout.update.replicate=2",
        "layout.changes=[{iteration: 2, update: {tensor_parallel: 2}}]",
    ],
    "more ranks": [
        "layout.changes=[{iteration: 1, update: {shard: 2}, rollout: {replicas: 2}},"
        "{iteration: 3, update: {}, rollout: {}}]",
    ],
}


def curve(runs: Runs, name: str, metric: str) -> list[float]:
    lines = (runs.run(name) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)[metric] for line in lines]


def weights(runs: Runs, name: str) -> dict[str, Any]:
    policy = runs.run(name) / "checkpoints" / f"{LENGTH - 1:06d}" / "policy"
    return load_file(policy / "model.safetensors")


def plan(runs: Runs, name: str, iteration: int) -> dict[str, Any]:
    path = runs.run(name) / "iterations" / f"{iteration:06d}" / "select.json"
    found: dict[str, Any] = json.loads(path.read_text())["outputs"]["plan"]["stages"]
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_layout_has_the_same_learning_curve(runs: Runs) -> None:
    runs.train("name=one", *SETTINGS)
    expected = curve(runs, "one", "reward/mean")
    assert len(set(expected)) > 1
    for name, layout in LAYOUTS.items():
        mine = name.replace(" ", "_")
        runs.train(f"name={mine}", *SETTINGS, *layout)
        assert curve(runs, mine, "reward/mean") == pytest.approx(expected, abs=1e-6), name
        norms = curve(runs, mine, "update/grad_norm")
        assert norms == pytest.approx(curve(runs, "one", "update/grad_norm"), rel=1e-4), name
        for key, tensor in weights(runs, "one").items():
            assert (weights(runs, mine)[key] - tensor).abs().max() < 1e-4, (name, key)
        assert runs.shared_memory() == []
    changed = [plan(runs, "mesh_change", iteration)["update"] for iteration in (1, 2)]
    assert [(d["replicas"], d["tensor_parallel"]) for d in changed] == [(2, 1), (1, 2)]
    runs.wait_for_workers_to_end()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", ["dp", "tp"])
def test_a_killed_run_resumes_under_another_layout(runs: Runs, layout: str) -> None:
    """Checkpoints and sealed stages belong to the run, not to the layout that made them."""
    runs.train("name=one", *SETTINGS)
    runs.train(*SETTINGS, *LAYOUTS[layout], fault="update.step0@2:1=kill", expect=1)
    runs.wait_for_workers_to_end()
    runs.train(*SETTINGS, "layout.update.shard=2")
    expected = curve(runs, "one", "reward/mean")
    assert curve(runs, "run", "reward/mean") == pytest.approx(expected, abs=1e-6)
    assert runs.executed("sealed").count((2, "rollout")) == 1
    assert runs.shared_memory() == []


@pytest.mark.slow
def test_placements_give_equal_bits(runs: Runs) -> None:
    """Threads are fixed to one by the settings, so nothing but the place differs."""
    short = ("iterations=1",)
    runs.train("name=turns", *short)
    runs.train("name=apart", *short, "layout.placement=separate")
    assert runs.weights(0, "turns") == runs.weights(0, "apart")
    reasons = json.loads((runs.run("apart") / "iterations" / "000000" / "select.json").read_text())[
        "outputs"
    ]["plan"]["reasons"]
    assert "separate" in reasons["update"]
    assert runs.shared_memory() == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("layout.update.tensor_parallel=3", "use 1 or 2 or 4"),
        ("layout.update.shard=64", "64 devices; this machine has"),
    ],
)
def test_impossible_layouts_end_the_run_before_anything_starts(
    runs: Runs, override: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(runs.config, [override])
    four_cores = Hardware(cpu_cores=4, memory_bytes=2**33)
    monkeypatch.setattr("flows.cli.training.read_hardware", lambda: four_cores)
    with pytest.raises(ConfigError, match=message):
        preflight(config, Path(config.runs_directory) / config.name)
