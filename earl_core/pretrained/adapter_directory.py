"""A directory in PEFT's format: the pairs of a low-rank adapter and the settings to read them with.

It holds `adapter_config.json` and `adapter_model.safetensors`. The pair of a matrix
`model.layers.0.self_attn.q_proj.weight` is `base_model.model.model.layers.0.self_attn.q_proj.`
followed by `lora_A.weight` [rank, in] and `lora_B.weight` [out, rank].
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from earl_core.system.errors import ConfigError
from earl_core.system.outside import read_text

CONFIG_FILE = "adapter_config.json"
PAIRS_FILE = "adapter_model.safetensors"
BASE_DIGEST = "base_digest"
"""Key of the metadata of `PAIRS_FILE` that names the model which the pairs belong to, by the digest
of its tensors; only EARL writes it."""
POLICY_FOLDER, ADAPTER_FOLDER = "policy", "adapter"
"""Folders of a checkpoint: of a whole model, and of an adapter."""
_PREFIX = "base_model.model."
_WEIGHT = ".weight"


def pair_names(matrix: str) -> tuple[str, str]:
    """Names of A and B of a matrix, which is named as in a state dict, `.weight` included."""
    stem = _PREFIX + matrix.removesuffix(_WEIGHT)
    return f"{stem}.lora_A{_WEIGHT}", f"{stem}.lora_B{_WEIGHT}"


def matrix_name(pair: str) -> str:
    """Name of the matrix that the A or B of this name belongs to. Raises `ValueError` for a name
    that is none of a pair's."""
    for side in (f".lora_A{_WEIGHT}", f".lora_B{_WEIGHT}"):
        if pair.startswith(_PREFIX) and pair.endswith(side):
            return pair.removeprefix(_PREFIX).removesuffix(side) + _WEIGHT
    raise ValueError(f"{pair} is no name of an adapter's tensor")


def chosen(matrices: Iterable[str], targets: Sequence[str]) -> list[str]:
    """Those of the matrices (names that end in `.weight`) whose module's name is a target, or ends
    with a dot and a target, in their order."""
    return [
        name
        for name in matrices
        if any(f".{name.removesuffix(_WEIGHT)}".endswith(f".{target}") for target in targets)
    ]


def adapter_config(base: str, rank: int, alpha: float, targets: Sequence[str]) -> dict[str, Any]:
    """What `adapter_config.json` says. base: name or path of the model that the pairs belong to."""
    return {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted(targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def read_adapter_config(directory: Path) -> dict[str, Any]:
    """The content of `adapter_config.json`. Raises `ConfigError` for a directory that has none, and
    for an adapter that is more than low-rank pairs."""
    path = directory / CONFIG_FILE
    try:
        config = dict(json.loads(read_text(path, str(path))))
    except OSError as error:
        # Somebody may name the checkpoint, or the run.
        places = (f"{ADAPTER_FOLDER}/", f"checkpoints/[0-9]*/{ADAPTER_FOLDER}/")
        inside = [each for place in places for each in sorted(directory.glob(place + CONFIG_FILE))]
        advice = f": name {inside[-1].parent}" if inside else ""
        raise ConfigError(
            f"{directory} is no adapter of PEFT's format: it has no {CONFIG_FILE}{advice}"
        ) from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"{directory} holds a {config.get('peft_type')} adapter, and not LORA")
    for key, plain in _PLAIN.items():
        if config.get(key) not in (None, plain, [], {}):
            raise ConfigError(
                f"{directory} holds an adapter with {key} {config[key]!r}, which is more than a "
                "low-rank pair beside each matrix: begin from one without"
            )
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_MOVES_BASE):
        raise ConfigError(
            f"{directory} holds an adapter that began with init_lora_weights {begun!r}, which "
            "changed the matrices of its model: have PEFT convert it (save_pretrained with "
            "path_initial_model_for_weight_conversion), or begin from another one"
        )
    for key in ("r", "lora_alpha"):
        value: Any = config.get(key)
        if type(value) not in (int, float) or not value > 0 or (key == "r" and value % 1):
            raise ConfigError(f"{path} has {value!r} as {key}, which is no size of a pair")
    if not (directory / PAIRS_FILE).is_file():
        raise ConfigError(f"{directory} has no {PAIRS_FILE}")
    return config


_MOVES_BASE = ("corda", "loftq", "lora_ga", "olora", "pissa")
"""Beginnings of PEFT's `init_lora_weights` with which the pairs belong to other matrices than the
model's files have."""

_PLAIN: dict[str, Any] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": None,
    "arrow_config": None,
    "bias": "none",
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "kasa_config": None,
    "layer_replication": None,
    "lora_bias": False,
    "monteclora_config": None,
    "modules_to_save": None,
    "rank_pattern": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
}
"""Settings of PEFT, and the value of each that leaves a pair plain."""


def is_adapter(directory: Path) -> bool:
    """Tell whether the directory holds an adapter, and no whole model."""
    return (directory / CONFIG_FILE).is_file() and not (directory / "config.json").is_file()


def policy_in(checkpoint: Path) -> Path:
    """The folder of a checkpoint in which its policy lies: an adapter's, or a model directory."""
    folder = checkpoint / ADAPTER_FOLDER
    return folder if is_adapter(folder) else checkpoint / POLICY_FOLDER


def write_adapter_config(directory: Path, config: dict[str, Any]) -> None:
    """Write `adapter_config.json` into the directory, which exists."""
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (directory / CONFIG_FILE).write_text(text, encoding="utf-8")
