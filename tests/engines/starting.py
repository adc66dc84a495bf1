"""How the tests start each engine."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from earl_core.config.rollout import VllmConfig
from earl_core.rollout.engines.torch_engine import TorchEngine
from tests.engines.driver import Driver
from tests.engines.forked import forked_engines

_VLLM_MISSING = importlib.util.find_spec("vllm") is None
_VLLM = pytest.mark.skipif(_VLLM_MISSING, reason="vllm is not installed")
ENGINES = ["torch", pytest.param("vllm", marks=[_VLLM, pytest.mark.slow])]
"""An engine of vLLM takes half a minute of a core to start."""


def start(
    kind: str, directory: Path, scratch: Path, dtype: str = "float32", **options: Any
) -> Driver:
    """A running engine of this kind; options: of both."""
    engine: TorchEngine | VllmEngine
    if kind == "torch":
        engine = TorchEngine(directory, dtype=dtype, **options)
    else:
        from earl_core.rollout.engines.vllm_engine import VllmEngine

        settings = VllmConfig(kv_cache_gib=1)
        engine = VllmEngine(directory, dtype=dtype, scratch=scratch, settings=settings, **options)
    driver = Driver(engine, directory)
    with forked_engines() if kind == "vllm" else nullcontext():
        driver.run(driver.engine.start())
    return driver
