"""Runs on vLLM with several engines, and with tensor parallelism inside one."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.models.tiny import build
from tests.flows.runs import Runs
from tests.flows.test_replicas import (
    GROUP,
    PROMPTS,
    Opened,
    kill_the_held_engine,
    opened,
    played,
    rows,
    weights,
)

__all__ = ["opened", "weights"]

pytestmark = pytest.mark.slow

VLLM = ("rollout.engine=vllm", "rollout.vllm.kv_cache_gib=1", "rollout.max_model_len=256")


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four heads of 32, a size that vLLM's attention has."""
    path = tmp_path_factory.mktemp("models") / "even"
    game = {"name": "tic_tac_toe", "options": {"style": "compact"}}
    build(path, environments=[game], hidden=128, layers=2, warm_start_steps=5)
    return path


@pytest.mark.campaign
@pytest.mark.parametrize(
    "layout", [["stages.rollout.replicas=2"], ["stages.rollout.tensor_parallel=2"]]
)
def test_runs_with_engines_of_two_devices(runs: Runs, layout: list[str]) -> None:
    runs.train(*VLLM, *layout, "rollout.threads=0")
    lines = [json.loads(x) for x in (runs.run() / "metrics.jsonl").read_text().splitlines()]
    assert [line["rollout/episodes"] for line in lines] == [16.0, 16.0]
    replicas = 2 if "replicas" in layout[0] else 1
    assert [line["rollout/replicas"] for line in lines] == [replicas, replicas]
    # Log-probs of every engine are those of the trainer, in the second iteration too, whose
    # engines have taken new weights.
    for line in lines:
        assert line["update/mismatch_max"] < 1e-4
    assert runs.shared_memory() == []
    runs.wait_for_workers_to_end()


@pytest.mark.campaign
def test_the_only_vllm_process_is_killed_as_it_starts_and_at_work(runs: Runs) -> None:
    """The ranks live on; the rollout is repeated with a fresh engine."""
    # The engine is looked for below the controller.
    runs.forked = False
    process = runs.start(*VLLM, "iterations=2")
    kill_engine(process.pid)
    while (1, "rollout") not in runs.executed("started"):
        assert process.poll() is None, runs.output_path(0).read_text()
        time.sleep(0.05)
    kill_engine(process.pid)
    assert process.wait(300) == 0, runs.output_path(0).read_text()
    lost = [x for x in runs.ledger() if "the stage is repeated" in x["event"]]
    assert (lost[-1]["iteration"], lost[-1]["stage"]) == (1, "rollout")
    assert "EngineLost" in lost[-1]["event"]
    assert runs.shared_memory() == []
    runs.wait_for_workers_to_end()


def kill_engine(controller: int) -> None:
    """SIGKILL to vLLM's engine process as soon as there is one."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        for child in psutil.Process(controller).children(recursive=True):
            with suppress(psutil.Error):
                if "EngineCor" in child.name():
                    child.kill()
                    return
        time.sleep(0.05)
    raise AssertionError("no engine process appeared")


def test_a_killed_vllm_process_costs_its_engine_only(
    opened: Opened, weights: object, tiny_model: Path, tmp_path: Path
) -> None:
    """Its worker lives on and says that the engine is lost; the next use starts a new one."""
    options = {"held": [PROMPTS - 1], "folder": str(tmp_path)}
    controller = opened(
        {"name": "tests.rollout.environments:HeldGame", "options": options},
        rollout={
            "engine": "vllm",
            "dtype": "float32",
            "prompts_per_iteration": PROMPTS,
            "group_size": GROUP,
            "max_turns": 5,
            "max_tokens_per_turn": 2,
            "max_model_len": 256,
            "vllm": {"kv_cache_gib": 1},
        },
    )
    deployment = StageDeployment(stage="rollout", replicas=2, max_running_requests=64)

    (tmp_path / "hold").touch()
    killer = threading.Thread(
        target=kill_the_held_engine, args=(controller, tmp_path, "EngineCore"), daemon=True
    )
    killer.start()
    first = played(controller, deployment, 0, weights)
    killer.join()
    assert [s["episode_id"] for s in rows(controller, first)] == list(range(PROMPTS * GROUP))
    assert first["metrics"]["replicas_lost"] == 1
    again = played(controller, deployment, 1, weights)
    assert again["metrics"]["replicas_lost"] == 0
