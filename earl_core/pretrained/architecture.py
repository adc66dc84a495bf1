"""The network that a model directory describes, with positions that do not depend on the batch.

transformers chooses the rotary factors of some models by the longest position of each forward
pass: those of LongRoPE (Phi-3 128k and its kin) and of dynamic NTK scaling. The log-probs of a
sample would depend on what it is packed with, keys that were cached earlier would have been made
with other factors, and vLLM chooses by its own rules. So the factors are fixed once, by the model's
limit (`max_position_embeddings`), for the trainer, the reference and every engine alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from earl_core.system.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def model_config(directory: Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """The configuration in a model directory, its positions pinned. Raises ConfigError for a
    directory with code of its own that nobody trusts."""
    from transformers import AutoConfig

    try:
        found = AutoConfig.from_pretrained(
            directory, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except ValueError as error:
        if trust_remote_code or "trust_remote_code" not in str(error):
            raise
        raise ConfigError(
            f"the model in {directory} brings Python code of its own, which is not run unasked: "
            "read it, then set model.trust_remote_code to true, or choose another model"
        ) from error
    return pin_positions(found)


def context_length(config: PretrainedConfig, wanted: int) -> int:
    """Most tokens of a sequence: as many as are wanted; 0: the model's own position range. Raises
    ConfigError when the range is shorter, or when nobody names one."""
    positions = int(getattr(config, "max_position_embeddings", 0) or 0)
    if positions and wanted > positions:
        raise ConfigError(
            f"max_model_len {wanted} exceeds the model's {positions} positions: lower "
            "rollout.max_model_len"
        )
    if not wanted and not positions:
        raise ConfigError("the model names no position range: set rollout.max_model_len")
    return wanted or positions


def pin_positions(config: PretrainedConfig) -> PretrainedConfig:
    """Fix in place the rotary factors that transformers would choose anew in each forward pass.

    LongRoPE: the long factors where the model's limit exceeds its original one, else the short
    ones, at every length. Dynamic NTK: no scaling, which is what it is up to the model's limit.
    """
    text: Any = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None) or 0
    for rope in _rope_parameters(text):
        kind = rope.get("rope_type", rope.get("type"))
        if kind == "longrope":
            original = (
                rope.get("original_max_position_embeddings")
                or getattr(text, "original_max_position_embeddings", None)
                or limit
            )
            chosen = "long" if limit > original else "short"
            for what in ("factor", "mscale"):
                if f"{chosen}_{what}" in rope:
                    rope[f"short_{what}"] = rope[f"long_{what}"] = rope[f"{chosen}_{what}"]
        elif kind == "dynamic" and not rope.get("alpha"):
            # With `alpha` (Hunyuan) the factors are fixed already.
            rope["rope_type"] = "default"
            for name in ("type", "factor"):
                rope.pop(name, None)
    return config


def _rope_parameters(text: Any) -> Iterator[dict[str, Any]]:
    """The model's rotary parameters: one mapping, or one for each kind of layer."""
    found = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in found.values() if isinstance(value, dict)]
    yield from nested or ([found] if found else [])
