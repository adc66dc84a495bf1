"""AdamW from the update's configuration, and its learning rate as a function of the iteration."""

from __future__ import annotations

import math

import torch
from torch import nn

from earl_core.config.update import UpdateConfig


def build_optimizer(model: nn.Module, config: UpdateConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; vectors (norms, biases) are not decayed.

    Tied weights are one parameter. The fused kernel is used; on the CPU it is deterministic.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {
            "params": [parameter for parameter in trained if parameter.ndim >= 2],
            "weight_decay": config.weight_decay,
        },
        {
            "params": [parameter for parameter in trained if parameter.ndim < 2],
            "weight_decay": 0.0,
        },
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )


def learning_rate(config: UpdateConfig, iteration: int, iterations: int) -> float:
    """The learning rate of an iteration, counted from 0, of a run of `iterations`.

    Warm-up rises linearly to the full rate over `warmup_iterations`; afterwards the schedule
    falls from it towards 0, which the iteration after the last would reach. It depends on the
    arguments only, so that a resumed run needs no scheduler state.
    """
    if iteration < config.warmup_iterations:
        return config.learning_rate * (iteration + 1) / config.warmup_iterations
    length = max(1, iterations - config.warmup_iterations)
    progress = min(1.0, (iteration - config.warmup_iterations) / length)
    if config.schedule == "linear":
        return config.learning_rate * (1.0 - progress)
    if config.schedule == "cosine":
        return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.learning_rate


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Use this rate from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = value
