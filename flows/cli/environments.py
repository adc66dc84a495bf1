"""`earl env check`: try environments out before they are trained on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from earl_core.config import load_config
from earl_core.config.environment import EnvironmentConfig
from earl_core.config.load import explain, recipe_names
from earl_core.config.refusal import refuse_override
from earl_core.config.yaml_text import read_yaml
from earl_core.environments.agent import PREFIX
from earl_core.environments.registry import BUILT_IN
from earl_core.environments.trial.findings import examine
from earl_core.secrets import redact
from earl_core.system.errors import ConfigError
from earl_core.system.finding import Level
from earl_core.system.similar import meant
from flows.cli.findings import show_findings, summary
from flows.cli.interrupt import exit_on_sigterm
from flows.cli.tables import make_console


def check(target: str, options: str | None, python: str | None, episodes: int, turns: int) -> int:
    """Print what was found; 1 if something breaks training, else 0.

    target: an environment's name or import path, that of an agent after "agent:", or a run file or
    recipe, whose environments are tried. options: YAML of the former. Raises ConfigError.
    """
    # Folders of the hosts go with the command.
    exit_on_sigterm()
    console = make_console()
    levels: Counter[Level] = Counter()
    for name, environment in _chosen(target, options, python).items():
        levels += show_findings(console, name, examine(environment, episodes, turns))
    console.print(f"\n{summary(levels, 'break', 'training')}", style="bold")
    return 1 if levels["blocks"] else 0


def _chosen(target: str, options: str | None, python: str | None) -> dict[str, EnvironmentConfig]:
    if target in BUILT_IN or ":" in target:
        agent = target.removeprefix(PREFIX) if target.startswith(PREFIX) else None
        name = None if agent else target
        given = _mapping(options)
        try:
            chosen = EnvironmentConfig(name=name, agent=agent, options=given, python=python)
        except ValidationError as error:
            raise ConfigError(explain(error.errors(), target)) from error
        return {target: chosen}
    if not Path(target).suffix and not Path(target).exists() and target not in recipe_names():
        raise ConfigError(
            f"{target!r} is no environment, run file or recipe",
            remedy=f"{meant(target, [*BUILT_IN, *recipe_names()])}name one of "
            f"{', '.join(BUILT_IN)}, package.module:Class, a file, or one of "
            f"the recipes {', '.join(recipe_names())}",
        )
    if options is not None or python is not None:
        raise ConfigError(
            f"--options and --python are for one environment, and {target!r} is a configuration",
            remedy="set them there",
        )
    config = load_config(target)
    suites = {f"suite {each.label}": each for each in config.evaluation.suites}
    played = {label or each.played: each for label, each in config.played.items()}
    return {**played, **suites}


def _mapping(options: str | None) -> dict[str, Any]:
    if options is None:
        return {}
    read = read_yaml(options, f"--options {redact(options)!r}")
    if not isinstance(read, dict):
        raise ConfigError(
            f"--options {options!r} is no mapping", remedy="write YAML, such as '{limit: 50}'"
        )
    for key, value in read.items():
        refuse_override(str(key), value)
    return read
