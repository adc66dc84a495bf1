"""The network that a model directory describes, with positions that do not depend on the batch.

transformers chooses the rotary factors of some models by the longest position of each forward
pass: those of LongRoPE (Phi-3 128k and its kin) and of dynamic NTK scaling. The log-probs of a
sample would depend on what it is packed with, keys that were cached earlier would have been made
with other factors, and vLLM chooses by its own rules. So the factors are fixed once, by the model's
limit (`max_position_embeddings`), for the trainer, the reference and every engine alike.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from earl_core.config.engine_models import check_context
from earl_core.deployment.shapes import ModelShape
from earl_core.system.errors import ConfigError
from earl_core.system.import_path import installed
from earl_core.system.outside import read_text

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LISTED_IN = ("auto_mappings", "configuration_auto")
_LISTED = re.compile(r'"([\w.-]+)"[,:] "(?!AutoConfig")\w+Config"')
"""A model type and its class, in these modules of `transformers.models.auto`."""


def model_config(directory: Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """The configuration in a model directory, its positions pinned. Raises ConfigError as
    `check_code` does."""
    from transformers import AutoConfig

    check_code(directory, trust_remote_code)
    return pin_positions(
        AutoConfig.from_pretrained(
            directory, trust_remote_code=trust_remote_code, local_files_only=True
        )
    )


def check_code(directory: Path, trust_remote_code: bool) -> None:
    """Raise ConfigError for a model of a type that transformers has no code of: the directory has
    it, and nobody trusts it, or there is none. Imports no transformers."""
    try:
        raw: Any = json.loads(read_text(directory / "config.json", "config.json"))
        kind, own = raw["model_type"], "AutoConfig" in (raw.get("auto_map") or ())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return  # Readers of its numbers say so, or transformers goes by names.
    if kind in _types_of_transformers() or (own and trust_remote_code):
        return
    if own:
        raise ConfigError(
            f"the model in {directory} brings Python code of its own, which is not run unasked: "
            "read it, then set model.trust_remote_code to true, or choose another model"
        )
    raise ConfigError(
        f"transformers {installed('transformers')} knows no models of type {kind!r}, as "
        f"{directory} has one: choose another model"
    )


@cache
def _types_of_transformers() -> frozenset[str]:
    """The model types that transformers has code of, from where it lists them."""
    found = importlib.util.find_spec("transformers")
    folder = Path(found.origin or "").parent if found else Path()
    texts = (folder / "models/auto" / f"{name}.py" for name in _LISTED_IN)
    return frozenset(kind for text in texts for kind in _LISTED.findall(text.read_text("utf-8")))


def shape_of(config: PretrainedConfig) -> ModelShape:
    """The numbers of a configuration, transformers' defaults among them. Raises ConfigError where
    one is missing."""
    try:
        return ModelShape.from_config(config.to_dict())
    except ValueError as error:
        raise ConfigError(f"{config.model_type} models cannot be used: {error}") from error


def context_length(config: PretrainedConfig, wanted: int) -> int:
    """Most tokens of a sequence: as many as are wanted; 0: the model's own position range. Raises
    ConfigError when the range is shorter, or when nobody names one."""
    positions = int(getattr(config, "max_position_embeddings", 0) or 0)
    check_context(positions, wanted)
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
