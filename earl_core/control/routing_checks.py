"""Whether the routers of a mixture can do what a run file asks of them, by its `config.json`."""

from __future__ import annotations

from earl_core.config import ConfigError, RunConfig
from earl_core.deployment.shapes import ModelShape
from earl_core.trajectory.routing import untold

_UNTOLD = frozenset(
    {
        *("deepseek_v4", "gemma4", "gemma4_text", "inkling_text", "jamba", "jetmoe", "llama4"),
        *("llama4_text", "longcat_flash", "phimoe", "zaya"),
    }
)
"""Model types of transformers whose routers draw, send gradients past their choice, or choose by
more than one `topk` of a token's scores. Engines, which try each router, know all kinds."""


def check_routing(config: RunConfig, model: ModelShape) -> None:
    """Raise `ConfigError` for settings of routers in a run of a model that has none, and for
    routers whose choice cannot be repeated."""
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
    if rollout.record_routing == "auto" and model.model_type in _UNTOLD:
        raise untold(f"{path} is a {model.model_type} model, whose")


def routing_warning(config: RunConfig, model: ModelShape) -> str:
    """What is to be said of a mixture that is trained under other experts than it was played with;
    empty for others. Precision is settled."""
    rollout = config.rollout
    if model.experts < 2 or rollout.record_routing == "auto" or rollout.dtype != "bfloat16":
        return ""
    return (
        "rollout.record_routing is off: the trainer's routers choose anew, and some tokens are "
        "trained under other experts than they were sampled with (in bfloat16 about a tenth of the "
        "choices); update/mismatch_mean shows what it costs"
    )
