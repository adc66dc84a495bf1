"""When two executions of a stage are the same: the key that a sealed manifest must carry.

The key covers the run, the iteration, the stage, the data of its inputs and the settings named
here. It never covers how the stage was laid out on the hardware: a plan may change between a
failure and the resume, and what was finished stays finished.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from earl_core.config.run import RunConfig
from earl_core.system.files import canonical_json

STAGES = ("select", "rollout", "reference", "reward", "advantage", "update", "publish")
"""Every stage and step of an iteration, in order; `reference` only with a KL penalty."""

_PLAY = (
    "seed",
    "model.path",
    "model.chat_template",
    "environment.name",
    "environment.options",
    "rollout.engine",
    "rollout.max_turns",
    "rollout.max_tokens_per_turn",
    "rollout.max_tokens_per_episode",
    "rollout.temperature",
    "rollout.answer_prefix",
    "rollout.stop",
    "rollout.dtype",
)
"""Whatever is played, for training or to evaluate."""

STAGE_SETTINGS: dict[str, tuple[str, ...]] = {
    "select": ("rollout", "experience", "update", "stages", "selector", "model.path"),
    "rollout": (
        *_PLAY,
        "environment.max_failed_share",
        "rollout.prompts_per_iteration",
        "rollout.group_size",
    ),
    "reference": ("model.path", "rollout.temperature", "update.precision"),
    "reward": (),
    "advantage": ("algorithm.advantage", "algorithm.kl"),
    "update": (
        "seed",
        "algorithm",
        "rollout.temperature",
        "update.precision",
        "update.learning_rate",
        "update.schedule",
        "update.warmup_iterations",
        "update.weight_decay",
        "update.beta1",
        "update.beta2",
        "update.epsilon",
        "update.max_grad_norm",
        "update.epochs",
        "update.minibatches",
    ),
    "publish": ("rollout.dtype",),
    "evaluation": (
        *_PLAY,
        "evaluation.episodes",
        "evaluation.temperature",
        "evaluation.options",
    ),
}


def stage_key(
    config: RunConfig, uid: str, iteration: int, stage: str, inputs: Sequence[str]
) -> str:
    """sha256 in hex; `inputs` are the data digests of the input manifests, in order."""
    content = [uid, iteration, stage, list(inputs), stage_settings(config, stage)]
    return hashlib.sha256(canonical_json(content)).hexdigest()


def stage_settings(config: RunConfig, stage: str) -> dict[str, Any]:
    """The settings that a stage's result depends on, by dotted name."""
    whole = config.model_dump(mode="json")
    return {name: look_up(whole, name) for name in STAGE_SETTINGS[stage]}


def look_up(mapping: dict[str, Any], dotted: str) -> Any:
    """The setting of this dotted name."""
    value: Any = mapping
    for part in dotted.split("."):
        value = value[part]
    return value
