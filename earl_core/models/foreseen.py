"""What is known of a model that is yet to be made: its shape, as far as its builder is one of ours,
and whether the builder takes its options. A run that cannot make the model, or that it does not
fit, is refused before anything starts. Imports no torch, and no builder."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from earl_core.config.model import ModelConfig
from earl_core.deployment.shapes import ModelShape
from earl_core.models.smollm2 import gguf_file
from earl_core.pretrained.model_directory import read_model_shape
from earl_core.selector.model.catalogue import MODELS
from earl_core.system.errors import ConfigError
from earl_core.system.written_signature import written_signature

_MIXTURE: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 32,
}  # fmt: skip
_STATES: dict[str, Any] = {
    "head_dim": 32, "linear_num_key_heads": 6, "linear_num_value_heads": 6,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": {**_MIXTURE, "norm_topk_prob": True},
    "qwen3_5_text": _STATES,
    "qwen3_5_moe_text": {**_STATES, **_MIXTURE, "shared_expert_intermediate_size": 128},
}
"""transformers' name of each, and its own settings; widths that vLLM's CPU build takes, too."""

_SMOLLM2 = "earl_core.models.smollm2:build"
_GIVEN = ("progress", "environments")
"""Parameters of builders that a worker has values for."""
_CHARACTERS = 64
"""A vocabulary that stands for that of a model with a token for each character."""


class Sizes(NamedTuple):
    """Sizes of a narrow model, under the names of `tiny.build`'s options."""

    family: str = "llama"
    hidden: int = 192
    layers: int = 4
    heads: int = 4
    max_position_embeddings: int = 4096

    def settings(self, vocabulary: int) -> dict[str, Any]:
        """Those of its `config.json` that say its shape. Raises ConfigError for a family that is
        not among `FAMILIES`."""
        if self.family not in FAMILIES:
            raise ConfigError(
                f"no model of the family {self.family!r} is made here: set "
                f"model.builder_options.family to one of {', '.join(FAMILIES)}"
            )
        return {
            "model_type": self.family,
            "vocab_size": vocabulary,
            "hidden_size": self.hidden,
            # The next multiple of 64 above 8/3 of the hidden size, Llama's own proportion.
            "intermediate_size": -(-self.hidden * 8 // (3 * 64)) * 64,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": True,
            **FAMILIES[self.family],
        }


def expected_shape(model: ModelConfig) -> ModelShape | None:
    """The shape of the model in `model.path`, or of the one that will be made there, whose
    vocabulary may be another; None of one that is to be downloaded, or made by a builder of one's
    own. Raises `ConfigError` as `read_model_shape` does, and for options of no model."""
    directory = Path(model.path)
    if (directory / "config.json").is_file():
        return read_model_shape(directory)
    if model.builder == _SMOLLM2:
        return MODELS["smollm2-135m"]
    if model.builder != "earl_core.models.tiny:build":
        return None
    usual = Sizes()
    given = {name: model.builder_options.get(name, getattr(usual, name)) for name in usual._fields}
    if any(type(value) is not type(getattr(usual, name)) for name, value in given.items()):
        return None  # The builder says what is wrong with them.
    settings = Sizes(**given).settings(_CHARACTERS)
    try:
        return ModelShape.from_config(settings)
    except ValueError as error:
        raise ConfigError(f"model.builder_options make no model: {error}") from error


def check_builder(model: ModelConfig) -> None:
    """Raise `EarlError` where the model has yet to be made and its builder does not take the
    options, as far as its source says so, or lacks the package with the model."""
    builder = model.builder
    if builder is None or (Path(model.path) / "config.json").is_file():
        return
    if (signature := written_signature(builder)) is not None:
        check_options(signature, model.builder_options, builder)
    if builder == _SMOLLM2:
        gguf_file()


def check_options(signature: inspect.Signature, options: Mapping[str, Any], builder: str) -> None:
    """Raise `ConfigError` for options that a builder does not take. builder: its import path."""
    given = dict.fromkeys(name for name in _GIVEN if name in signature.parameters)
    try:
        signature.bind("directory", **{**given, **options})
    except TypeError as error:
        known = ", ".join(name for name in [*signature.parameters][1:] if name not in _GIVEN)
        raise ConfigError(
            f"model.builder_options do not fit {builder!r}: {error}",
            remedy=f"use some of {known}",
        ) from None
