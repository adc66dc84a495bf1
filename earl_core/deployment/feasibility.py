"""Whether a configured layout is possible for the model and on the hardware."""

from __future__ import annotations

import math

from earl_core.config.run import RunConfig
from earl_core.deployment.shapes import Hardware, ModelShape
from earl_core.system.errors import ConfigError


def check_layout(config: RunConfig, model: ModelShape, hardware: Hardware) -> None:
    """Raise `ConfigError` for a layout that this model or this machine does not allow.

    The message names the degrees that work, or the devices there are.
    """
    check_devices(config, hardware)
    if model.experts > 1 and config.rollout.engine == "vllm":
        raise ConfigError(
            f"rollout.engine=vllm cannot take new weights of a mixture of {model.experts} experts "
            "while it runs: set rollout.engine=torch, or choose a model without experts"
        )
    for key, iteration in config.layout.steps():
        rollout, update = config.layout.at(iteration)
        _check_degree(f"{key}.rollout.tensor_parallel", rollout.tensor_parallel, model, True)
        _check_degree(f"{key}.update.tensor_parallel", update.tensor_parallel, model, False)


def check_devices(config: RunConfig, hardware: Hardware) -> None:
    """Raise `ConfigError` when a layout needs more devices than there are."""
    layout = config.layout
    unit = "GPUs" if hardware.gpus else "CPU cores"
    for key, iteration in layout.steps():
        rollout, update = layout.at(iteration)
        needed = layout.placed.devices(rollout.devices, update.ranks)
        if needed > hardware.devices:
            raise ConfigError(
                f"{key} asks for {rollout.text} and {update.text}, {layout.placement}, which need "
                f"{needed} devices; this machine has {hardware.devices} {unit}: lower a degree"
                + ("" if layout.placement == "colocated" else ", or set layout.placement=colocated")
            )
        engine, rank = layout.threads(config.rollout, config.update, hardware.cpu_cores, iteration)
        together = layout.placed.devices(1, 1) > 1
        wanted = engine * rollout.devices + rank * update.ranks
        if together and wanted > max(hardware.cpu_cores, rollout.devices + update.ranks):
            raise ConfigError(
                f"rollout.threads and update.threads make {wanted} threads that work at the same "
                f"time under layout.placement {layout.placement}, more than the "
                f"{hardware.cpu_cores} CPU cores: lower them, or set both to 0"
            )


def _check_degree(key: str, degree: int, model: ModelShape, engine: bool) -> None:
    if degree > 1 and degree not in (working := tensor_degrees(model, engine)):
        raise ConfigError(
            f"{key} is {degree}, which does not divide the model's {model.attention_heads} "
            f"attention heads, {model.key_value_heads} key-value heads and feed-forward width of "
            f"{model.feed_forward}: use {' or '.join(map(str, working))}"
        )


def tensor_degrees(model: ModelShape, engine: bool) -> list[int]:
    """Tensor-parallel degrees that divide the model. engine: engines may copy key-value heads."""
    heads, pairs = model.attention_heads, model.key_value_heads
    return [
        degree
        for degree in range(1, heads + 1)
        if math.gcd(heads, model.feed_forward) % degree == 0
        and (pairs % degree == 0 or (engine and degree % pairs == 0))
    ]
