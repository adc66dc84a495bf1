"""What this host and the model's configuration file say, without importing torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from earl_core.config import ConfigError
from earl_core.selector import Hardware, ModelShape


def read_hardware() -> Hardware:
    """Cores this process may use, memory, and NVIDIA GPUs if the driver's tool is there."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus = _read_gpus()
    return Hardware(
        cpu_cores=cores,
        memory_bytes=memory,
        gpus=len(gpus),
        gpu_memory_bytes=min((size for _, size in gpus), default=0),
        gpu_name=gpus[0][0] if gpus else "",
    )


def _read_gpus() -> list[tuple[str, int]]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rpartition(",") for line in found.stdout.splitlines() if "," in line]
    return [(name.strip(), int(size) * 2**20) for name, _, size in rows]


def read_model_shape(directory: Path) -> ModelShape:
    """The numbers of `config.json`, under the names that Llama-, Qwen- and GPT-2-like models use.

    Raises `ConfigError` when the directory is not a model or its configuration lacks a number.
    """
    try:
        raw: dict[str, Any] = json.loads((directory / "config.json").read_text())
    except OSError as error:
        raise ConfigError(
            f"model.path {str(directory)!r} is not a model directory (no config.json): prepare "
            "the model first, or give model.builder"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{directory / 'config.json'} is not valid JSON: {error}") from error
    try:
        return ModelShape.from_config(raw)
    except ValueError as error:
        raise ConfigError(f"{directory / 'config.json'} cannot be used: {error}") from error
