"""Names of flow runs, after the run and the iteration; Prefect asks for them when a flow begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect.context import FlowRunContext

from earl_core.config import ConfigError, load_config


def _given() -> dict[str, Any]:
    context = FlowRunContext.get()
    return dict(context.parameters or {}) if context is not None else {}


def _configured() -> str:
    """The run's name, as far as it can be told from the parameters."""
    given = _given()
    if given.get("name"):
        return str(given["name"])
    try:
        return load_config(given["config"], given.get("overrides") or []).name
    except ConfigError:
        return Path(given["config"]).stem


def train_name() -> str:
    """Name a flow run, such as `train tictactoe_tiny`."""
    return f"train {_configured()}"


def profile_name() -> str:
    """Name a flow run, such as `profile tictactoe_tiny`."""
    return f"profile {_configured()}"


def iteration_name() -> str:
    """Name a flow run, such as `tictactoe_tiny 12`; the flow says the number once it knows it."""
    given = _given()
    number = given.get("number")
    return f"{Path(given['run']).resolve().name} {'next' if number is None else number}"


def evaluate_name() -> str:
    """Name a flow run, such as `evaluate tictactoe_tiny last`."""
    given = _given()
    return f"evaluate {Path(given['run']).resolve().name} {given['checkpoint']}"
