"""Runs under different layouts learn the same: one rank, meshes of two, a change in the middle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from earl_core.config import ConfigError, load_config
from earl_core.deployment.shapes import Hardware
from flows.cli.training import preflight
from tests.flows.runs import LEARNING, Runs
from tests.learnt import weights_in

LAYOUTS = {
    "cp": ["stages.update.context_parallel=2"],
    "dp then tp": [
        "stages.update.replicas=2",
        "stages.changes=[{iteration: 2, update: {tensor_parallel: 2}}]",
    ],
    "two hosts": [
        "cluster.hosts=2",
        "stages.update.replicas=2",
        "stages.rollout.replicas=2",
    ],
    "more ranks": [
        "stages.changes=[{iteration: 1, update: {shard: 2}, rollout: {replicas: 2}},"
        "{iteration: 3, update: {}, rollout: {}}]",
    ],
}


def curve(runs: Runs, metric: str) -> list[float]:
    return [line[metric] for line in runs.metrics()]


def weights(runs: Runs) -> dict[str, Any]:
    (*_, last) = sorted((runs.run() / "checkpoints").iterdir())
    return weights_in(last / "policy")


def plan(runs: Runs, iteration: int) -> dict[str, Any]:
    path = runs.run() / "iterations" / f"{iteration:06d}" / "select.json"
    found: dict[str, Any] = json.loads(path.read_text())["outputs"]["plan"]
    return found


@pytest.mark.campaign
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_same_learning_curve(
    layout: str, runs: Runs, undisturbed: Callable[..., Runs]
) -> None:
    one = undisturbed(*LEARNING)
    expected = curve(one, "reward/mean")
    assert len(set(expected)) > 1
    runs.train(*LEARNING, *LAYOUTS[layout])
    assert curve(runs, "reward/mean") == pytest.approx(expected, abs=1e-6)
    norms = curve(one, "update/grad_norm")
    assert curve(runs, "update/grad_norm") == pytest.approx(norms, rel=1e-4)
    mine = weights(runs)
    for key, tensor in weights(one).items():
        assert (mine[key] - tensor).abs().max() < 1e-4, key
    if layout == "dp then tp":
        changed = [plan(runs, iteration)["stages"]["update"] for iteration in (1, 2)]
        assert [(d["replicas"], d["tensor_parallel"]) for d in changed] == [(2, 1), (1, 2)]
    assert runs.shared_memory() == []
    runs.wait_for_workers_to_end()


@pytest.mark.campaign
@pytest.mark.parametrize(
    "degree", [pytest.param("replicas", marks=pytest.mark.campaign), "tensor_parallel"]
)
def test_a_killed_run_resumes_under_another_layout(
    degree: str, runs: Runs, undisturbed: Callable[..., Runs]
) -> None:
    """Checkpoints and sealed stages belong to the run, not to the layout that made them."""
    killed = runs.train(
        *LEARNING,
        f"stages.update.{degree}=2",
        "deadlines.repeats=0",
        fault="update.step0@2:1=kill",
        expect=1,
    )
    assert "SIGKILL" in killed
    runs.wait_for_workers_to_end()
    runs.train(*LEARNING, "stages.update.shard=2")
    expected = curve(undisturbed(*LEARNING), "reward/mean")
    assert curve(runs, "reward/mean") == pytest.approx(expected, abs=1e-6)
    assert runs.executed("sealed").count((2, "rollout")) == 1
    assert runs.shared_memory() == []


@pytest.mark.slow
def test_placements_give_equal_bits(runs: Runs, undisturbed: Callable[..., Runs]) -> None:
    """Threads are fixed to one by the settings, so nothing but the place differs."""
    runs.train("iterations=1", "stages.placement=separate")
    assert runs.weights(0) == undisturbed().weights(0)
    assert "separate" in plan(runs, 0)["reasons"]["update"]
    assert runs.shared_memory() == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stages.update.tensor_parallel=3", "use 1 or 2 or 4"),
        ("stages.update.shard=64", "64 devices; this machine has"),
    ],
)
def test_impossible_layouts_end_the_run_before_anything_starts(
    runs: Runs, override: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(runs.config, [override])
    four_cores = Hardware(cpu_cores=4, memory_bytes=2**33)
    monkeypatch.setattr(
        "flows.cli.checks.configuration.expected_hardware", lambda config: four_cores
    )
    with pytest.raises(ConfigError, match=message):
        preflight(config, Path(config.runs_directory) / config.name)
