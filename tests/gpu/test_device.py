"""The device itself: what is measured of it and read of it, and the memory formula."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from earl_core.config.algorithm import AlgorithmConfig
from earl_core.config.model import ModelConfig
from earl_core.config.update import UpdateConfig
from earl_core.deployment.shapes import Hardware, ModelShape
from earl_core.deployment.stage_deployment import Checkpointing, StageDeployment
from earl_core.learner.policy_learner import PolicyLearner
from earl_core.selector.model.candidates import memory_model
from earl_core.selector.model.devices import device_of, is_known
from earl_core.selector.model.memory import TrainingNeeds
from earl_core.system.gpus import driver_version, visible_gpus
from earl_core.system.hardware import read_resources
from earl_core.tensors import device_speed
from tools.shapes import SHAPES, random_sample, save_random_model


def test_a_measured_device_does_what_its_figures_say(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(device_speed, "PART_SECONDS", 0.05)
    figures = device_speed.measure(device)
    assert figures.memory_bytes > 2**30
    assert 1e-6 < figures.layer_seconds < 0.1
    if device.type == "cpu":
        assert 1e9 < figures.flops < 1e14
        assert 1e8 < figures.memory_bandwidth < 1e13
        return
    name = torch.cuda.get_device_name()
    hardware = Hardware(cpu_cores=1, memory_bytes=1, gpus=1, gpu_name=name, figures=figures)
    if not is_known(hardware):
        pytest.skip(f"no data sheet of {name} is known, which could be compared")
    sheet = device_of(hardware)
    assert 0.5 < figures.flops / sheet.flops < 1.05
    assert 0.6 < figures.memory_bandwidth / sheet.memory_bandwidth < 1.05
    assert figures.host_bandwidth < 1.05 * sheet.host_bandwidth


@pytest.mark.gpu
def test_the_driver_says_what_torch_says(cuda: torch.device) -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    found, links = visible_gpus()
    assert len(found) == torch.cuda.device_count() == read_resources().gpus
    for index, gpu in enumerate(found):
        assert gpu.name == torch.cuda.get_device_name(index)
        memory = torch.cuda.get_device_properties(index).total_memory
        assert gpu.memory_bytes == pytest.approx(memory, rel=0.03)
        # A virtual machine may not know which cores are near.
        assert gpu.cores <= set(range(os.cpu_count() or 1))
    assert links.nvlink_gpus >= 1
    driver = driver_version()
    assert driver is not None
    assert driver.cuda // 1000 >= int(str(torch.version.cuda).partition(".")[0])


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", ["none", "full"], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("context", [2048, 8192])
def test_the_memory_formula_is_within_a_tenth_of_what_torch_reserves(
    cuda: torch.device, context: int, checkpointing: Checkpointing, tmp_path: Path
) -> None:
    """An update of four layers of Qwen2.5-0.5B, in bf16."""
    shape = dataclasses.replace(SHAPES["qwen2.5-0.5b"], layers=4)
    save_random_model(shape, tmp_path, positions=context)
    settings = UpdateConfig(
        precision="bf16", max_tokens_per_microbatch=context, activation_checkpointing=checkpointing
    )
    learner = PolicyLearner(ModelConfig(path=str(tmp_path)), settings, AlgorithmConfig())
    draw = np.random.default_rng(0)
    samples = [random_sample(draw, context, shape.vocabulary, number=n) for n in range(2)]
    # The first makes the optimizer's state.
    learner.update(samples, iteration=0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert learner.update(samples, iteration=1)["grad_norm"] > 0
    measured = torch.cuda.max_memory_reserved()
    hardware = Hardware(
        cpu_cores=8,
        memory_bytes=2**36,
        gpus=1,
        gpu_memory_bytes=torch.cuda.get_device_properties(0).total_memory,
        gpu_name="NVIDIA H100 80GB HBM3",  # memory does not depend on speed
    )
    layout = StageDeployment(
        "update", max_tokens_per_microbatch=context, activation_checkpointing=checkpointing
    )
    model = ModelShape.from_config(shape.config(context).to_dict())
    formula = memory_model(model, hardware).training(
        layout, float(context), TrainingNeeds(answered=0.5, compiled=settings.compiles(gpu=True))
    )
    assert formula.total == pytest.approx(measured, rel=0.1)
