"""What vLLM is told, and what it makes of it, on a CPU and on GPUs that only seem to be there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from earl_core.config.rollout import VllmConfig
from earl_core.deployment.shapes import Hardware
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.rollout.engines import vllm_environment
from earl_core.rollout.engines.base_engine import EngineSettings
from earl_core.selector.model.candidates import memory_model
from earl_core.selector.model.catalogue import MODELS
from earl_core.system.errors import ConfigError
from tests.engines.gpu_platforms import GPUS, resolved
from tests.engines.models import make

pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("platforms")
    make("llama_tied", directory)
    return directory


@pytest.fixture(scope="module")
def on_gpus(model: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.gpu_platforms", str(model)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(("gpu", "prefill"), zip(GPUS, (8192, 8192, 16384, 16384), strict=True))
def test_a_gpu_gets_graphs_compilation_and_its_own_prefill_steps(
    on_gpus: dict[str, Any], gpu: str, prefill: int
) -> None:
    found = on_gpus[gpu]
    assert not found["eager"]
    assert (found["graphs"], found["compiled"]) == ("FULL_AND_PIECEWISE", "VLLM_COMPILE")
    # Every number of running sequences has a graph.
    assert found["captured"] >= found["running"] == 256
    assert found["prefill"] == prefill
    # The selector's formula counts on the same.
    name, size, _ = GPUS[gpu]
    shape = MODELS["qwen2.5-7b"]
    hardware = Hardware(
        cpu_cores=8, memory_bytes=1, gpus=1, gpu_name=name, gpu_memory_bytes=size << 30
    )
    memory = memory_model(shape, hardware).vllm(StageDeployment("rollout"), VllmConfig())
    width = 4 * shape.hidden_size + 2 * shape.query_size + 4 * shape.feed_forward
    assert memory.activations == 2 * prefill * width
    assert found["sleeps"]
    assert found["block_size"] == 16
    assert found["arguments"]["gpu_memory_utilization"] == 0.85
    assert "kv_cache_memory_bytes" not in found["arguments"]
    assert "block_size" not in found["arguments"]


def test_graphs_reach_up_to_a_large_limit(on_gpus: dict[str, Any]) -> None:
    assert on_gpus["many"]["captured"] == 1008
    assert on_gpus["many"]["running"] == 1000


def test_eager_execution_and_the_block_size_can_be_asked_for(on_gpus: dict[str, Any]) -> None:
    assert on_gpus["asked"]["eager"]
    assert (on_gpus["asked"]["graphs"], on_gpus["asked"]["captured"]) == ("NONE", 0)
    assert on_gpus["asked"]["block_size"] == 64


def test_the_engine_is_spawned_on_a_gpu(on_gpus: dict[str, Any]) -> None:
    assert on_gpus["start_method"] == "spawn"


def test_a_cpu_runs_eagerly_with_whole_prompts(model: Path) -> None:
    vllm_environment.load()
    settings = VllmConfig(kv_cache_gib=1)
    found = resolved(model, EngineSettings(dtype="float32"), settings)
    assert found["eager"]
    assert (found["graphs"], found["block_size"], found["prefill"]) == ("NONE", 32, 8192)
    assert found["arguments"]["kv_cache_memory_bytes"] == 2**30
    assert found["arguments"]["enable_chunked_prefill"] is False
    for name in ("gpu_memory_utilization", "enable_sleep_mode", "compilation_config"):
        assert name not in found["arguments"]
    with pytest.raises(ConfigError, match=r"block_size is 48.*multiple of 32"):
        vllm_environment.platform_arguments(VllmConfig(block_size=48), 256)
    with pytest.raises(ConfigError, match="kv_cache_gib"):
        vllm_environment.platform_arguments(VllmConfig(kv_cache_gib=None), 256)
