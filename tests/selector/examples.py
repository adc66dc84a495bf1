"""Inputs that the selector's tests share."""

from __future__ import annotations

from typing import Any

from earl_core.config.rollout import RolloutConfig
from earl_core.config.selector import SelectorConfig
from earl_core.config.update import UpdateConfig
from earl_core.deployment.shapes import Hardware
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.selector.choice.policy import select
from earl_core.selector.choice.selection import SelectionInput, Statistics
from earl_core.selector.model.catalogue import MODELS
from earl_core.selector.model.devices import cluster

GIB = 2**30


def given(
    context: float | tuple[float, ...] = 8192.0,
    *,
    model: str = "llama-3.1-8b",
    hosts: int = 1,
    gpus: int = 8,
    episodes: int = 128,
    selector: dict[str, Any] | None = None,
    rollout: dict[str, Any] | None = None,
    **fields: Any,
) -> SelectionInput:
    """A run under `live_tokens`; context: the mean of each past iteration, the longest is twice."""
    means = context if isinstance(context, tuple) else (context,)
    sizes = {"prompts_per_iteration": episodes, "group_size": 1, "max_turns": 4}
    sizes["max_model_len"] = 16384
    values: dict[str, Any] = {
        "iteration": 5,
        "rollout": RolloutConfig(**{**sizes, **(rollout or {})}),
        "update": UpdateConfig(),
        "needs_reference": False,
        "hardware": cluster("h100-80gb", hosts, gpus),
        "model": MODELS[model],
        "statistics": Statistics(
            context_mean=means,
            context_max=tuple(2 * mean for mean in means),
            generated_share=(0.5,),
            turns_mean=(4.0,),
        ),
        "selector": SelectorConfig(**{"policy": "live_tokens", **(selector or {})}),
    }
    return SelectionInput(**{**values, **fields})


def bare(deployment: StageDeployment) -> StageDeployment:
    """Without the context that engines are built for, as candidates are."""
    return deployment._replace(max_model_len=0)


def host(memory: float, context: float = 500.0, **fields: Any) -> SelectionInput:
    """SmolLM2 on four cores; memory: GiB."""
    machine = Hardware(cpu_cores=4, memory_bytes=int(memory * GIB))
    rollout = {"engine": "torch", "max_model_len": 2048, **fields.pop("rollout", {})}
    base = {"model": "smollm2-135m", "hardware": machine, "episodes": 64, "rollout": rollout}
    return given(context, **{**base, **fields})


def chosen(item: SelectionInput, stage: str = "update") -> StageDeployment:
    return bare(select(item)[stage])
