"""Keys of a run file that name code, and the code that they name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from earl_core.config.environment import EnvironmentConfig
from earl_core.config.run import RunConfig
from earl_core.secrets import is_reference
from earl_core.system.import_path import is_foreign


def named_code(config: RunConfig) -> dict[str, str]:
    """Map keys to the others' code that they name: import paths, programs, a model's Python files.

    Texts in options count where they could be an import path, whoever reads them.
    """
    found: dict[str, str] = {}
    labels = {
        f"environments.{label}" if label else "environment": each
        for label, each in config.played.items()
    }
    labels |= {f"evaluation.suites.{each.label}": each for each in config.evaluation.suites}
    for key, environment in labels.items():
        found |= _of_environment(key, environment)
    found |= _paths("evaluation.options", config.evaluation.options)
    for number, function in enumerate(config.reward.functions):
        found |= _paths(f"reward.functions.{number}", function.model_dump(mode="json"))
    if config.reward.python is not None:
        found["reward.python"] = config.reward.python
    found |= _paths("algorithm", config.algorithm.model_dump(mode="json"))
    if config.model.trust_remote_code:
        found["model.trust_remote_code"] = config.model.shown
    found |= _paths("model", {"builder": config.model.builder})
    return found | _paths("stages", {"placement": config.stages.placement})


def _of_environment(key: str, environment: EnvironmentConfig) -> dict[str, str]:
    found = _paths(key, {
        "name": environment.name, "options": environment.options, "tools": environment.tools,
    })  # fmt: skip
    command = environment.options.get("command")
    runs = environment.agent in ("program", "task_directories")
    if runs and isinstance(command, list | tuple):
        found[f"{key}.options.command"] = " ".join(map(str, command))
    elif environment.agent is not None:
        found[f"{key}.agent"] = environment.agent
    if environment.python is not None:
        found[f"{key}.python"] = environment.python
    for number, server in enumerate(environment.mcp):
        if server.command is not None:
            found[f"{key}.mcp.{number}.command"] = " ".join(server.command)
    return found


def _paths(key: str, value: Any) -> dict[str, str]:
    return dict(_walk(key, value))


def _walk(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _walk(f"{key}.{name}", each)
    elif isinstance(value, str):
        if is_foreign(value) and not is_reference(value):
            yield key, value
    elif isinstance(value, Sequence):
        for number, each in enumerate(value):
            yield from _walk(f"{key}.{number}", each)
