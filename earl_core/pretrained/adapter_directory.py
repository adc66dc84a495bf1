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

CONFIG_FILE = "adapter_config.json"
PAIRS_FILE = "adapter_model.safetensors"
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


def write_adapter_config(directory: Path, config: dict[str, Any]) -> None:
    """Write `adapter_config.json` into the directory, which exists."""
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (directory / CONFIG_FILE).write_text(text, encoding="utf-8")
