"""Names of numbers, and the load of the machine."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.tracking.metric_catalogue import CATALOGUE, described, entry_of, for_mlflow, mlflow_name
from tasks.tracking.system_metrics import SystemMonitor, system_samples
from tests.nvml import ERRORS, H100, Machine, install
from tests.tracking.conftest import Runs, finish, history, until


def test_every_name_is_there_once_and_reachable() -> None:
    for names in (
        Counter(metric.name for metric in CATALOGUE),
        Counter(metric.mlflow for metric in CATALOGUE if metric.mlflow),
    ):
        assert set(names.values()) == {1}
    for metric in CATALOGUE:
        found = entry_of(metric.name.replace("*", "x"))
        assert found is not None
        assert found[0] is metric, metric.name


def test_the_first_screen_is_return_lengths_speed_and_wins() -> None:
    row = {
        "rollout/outcome/win": 0.5,
        "rollout/outcome/draw": 0.25,
        "rollout/turns/mean": 4.0,
        "rollout/tokens_per_second": 100.0,
        "rollout/context/mean": 50.0,
        "rollout/return/mean": 0.25,
        "reward/mean": 0.25,
        "advantage/mean": 0.0,
        "rollout/environment/tries": 2.0,
        "mine/own": 3.0,
        "update/grad_norm": math.nan,
    }
    assert sorted(for_mlflow(row, scored=False)) == [
        "1_learning/return",
        "1_learning/tokens_per_episode",
        "1_learning/tokens_per_second",
        "1_learning/turns_per_episode",
        "1_learning/win_rate",
        "2_outcomes/draw",
        "environment/tries",
        "mine/own",
    ]
    assert for_mlflow(row, scored=True)["1_learning/reward"] == 0.25
    assert mlflow_name("evaluation/suite/sums/pass_at_4/low") is None
    assert mlflow_name("evaluation/suite/sums/pass_at_4") == "evaluation/sums/pass_at_4"
    assert described({"update/entropy", "advantage/mean"}) == [
        {
            "metric": "3_health/entropy",
            "unit": "nats",
            "description": "Mean entropy of the sampled tokens",
            "in metrics.jsonl": "update/entropy",
        }
    ]


def test_the_load_of_the_machine_reaches_mlflow_and_ends_with_the_run(runs: Runs) -> None:
    run = runs.run()
    tracker = runs.tracker(run, retry_seconds=0.5)
    finish(run, tracker, 0)
    assert until(lambda: tracker.run_id and history(tracker.uri, tracker.run_id, "system/cpu"))
    tracker.close()
    sample, *_ = system_samples(run.path)
    assert sample["system/memory"] > sample["system/memory_of_run"] > 2**20
    assert sample["system/disk_free"] > 0
    for name in ("system/memory", "system/disk_free"):
        assert history(tracker.uri, tracker.run_id, name)[0] == sample[name]


def test_gpus_as_their_driver_tells_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shy = replace(H100, load=None, power=None)
    module = install(monkeypatch, Machine([H100, shy]))
    monitor = SystemMonitor(tmp_path)
    assert until(lambda: system_samples(tmp_path))
    monitor.close()
    sample, *_ = system_samples(tmp_path)
    assert {name: value for name, value in sample.items() if "gpu" in name} == {
        "system/gpu_0_load": 37.0,
        "system/gpu_0_memory": 2.0**30,
        "system/gpu_0_power": 55.5,
        "system/gpu_1_memory": 2.0**30,
    }
    assert module.open == 0


def test_a_driver_that_does_not_answer_ends_no_monitor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, Machine([H100], broken=ERRORS["NVMLError_GpuIsLost"]))
    monitor = SystemMonitor(tmp_path)
    assert until(lambda: system_samples(tmp_path))
    monitor.close()
    assert not [name for name in system_samples(tmp_path)[0] if "gpu" in name]
