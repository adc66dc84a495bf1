"""Whether the routers of a mixture can do what a run file asks of them, by its `config.json`."""

from __future__ import annotations

from earl_core.config import ConfigError, RunConfig
from earl_core.deployment.shapes import ModelShape
from earl_core.trajectory.routing import untold

_UNTOLD = frozenset(
    {
        *("deepseek_v4", "inkling_text", "jamba", "jetmoe", "llama4", "llama4_text"),
        *("longcat_flash", "phimoe", "zaya"),
    }
)
"""Model types of transformers whose routers draw, send gradients past their choice, or choose by
more than one `topk` of a token's scores. Engines, which try each router, know all kinds."""

_RECORDING = ("torch",)
"""Engines that say which experts they have chosen."""


def check_routing(config: RunConfig, model: ModelShape) -> None:
    """Raise `ConfigError` for settings of routers in a run of a model that has none, for routers
    whose choice cannot be repeated, and for a loss that counts experts which nobody records."""
    path, rollout = config.initial_model.path, config.rollout
    balanced = config.algorithm.router_aux_loss_coef > 0
    if model.experts < 2:
        given = {
            "model.freeze_routers is true": config.model.freeze_routers,
            "algorithm.router_aux_loss_coef is not 0": balanced,
        }
        for what, there in given.items():
            if there:
                raise ConfigError(
                    f"{what}, but {path} has no experts to choose among: leave it out"
                )
        return
    if rollout.engine in _RECORDING:
        if rollout.record_routing == "auto" and model.model_type in _UNTOLD:
            raise untold(f"{path} is a {model.model_type} model, whose")
    elif balanced:
        raise ConfigError(
            "algorithm.router_aux_loss_coef counts the experts that were recorded, and "
            f"rollout.engine {rollout.engine} records none: use rollout.engine=torch, or leave the "
            "coefficient out"
        )


def routing_warning(config: RunConfig, model: ModelShape) -> str:
    """What is to be said of a mixture that is trained under other experts than it was played with;
    empty for others. Precision is settled."""
    rollout = config.rollout
    recorded = rollout.engine in _RECORDING
    if model.experts < 2 or (
        recorded and (rollout.record_routing == "auto" or rollout.dtype != "bfloat16")
    ):
        return ""
    why = "rollout.record_routing is off"
    if rollout.record_routing == "auto":
        why = f"rollout.engine {rollout.engine} does not record the experts of its tokens yet"
    return (
        f"{why}: the trainer's routers choose anew, and some tokens are trained under other "
        "experts than they were sampled with (in bfloat16 about a tenth of the choices); "
        "update/mismatch_mean shows what it costs"
        + ("" if recorded else "; rollout.engine=torch records them")
    )
