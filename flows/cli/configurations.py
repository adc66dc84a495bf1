"""`earl config`: configurations as they are resolved, compared, and described."""

from __future__ import annotations

import json
from pathlib import Path

from earl_core.config import RunConfig, load_config
from earl_core.config.load import dump_config, recipe_names
from earl_core.run.record import flat, stored_config
from earl_core.system.errors import ConfigError
from earl_core.system.plural import plural
from flows.cli.tables import make_console, rows_table


def find_configuration(what: str, runs_directory: str, overrides: list[str]) -> RunConfig:
    """Return the configuration of a recipe, a run file or a run, with overrides; a recipe goes
    before a run of its name. Raises `ConfigError`."""
    if what in recipe_names() or Path(what).is_file():
        return load_config(what, overrides)
    for path in (Path(what), Path(runs_directory) / what):
        if (path / "config.yaml").is_file():
            return stored_config(path, overrides)
    raise ConfigError(
        f"{what!r} is no recipe, run file or run",
        remedy=f"name one of the recipes {', '.join(recipe_names())}, a file, or a run of "
        f"{runs_directory}/",
    )


def show(what: str, runs_directory: str, overrides: list[str], as_json: bool) -> None:
    """Print it whole, defaults included; secrets are references in it."""
    config = find_configuration(what, runs_directory, overrides)
    text = json.dumps(config.model_dump(mode="json"), indent=1) if as_json else dump_config(config)
    print(text.rstrip())


def print_schema() -> None:
    """Print the JSON schema of run files."""
    print(json.dumps(RunConfig.model_json_schema(), indent=1))


def diff(one: str, other: str, runs_directory: str, as_json: bool) -> None:
    """Print the settings that differ, and both values of each; null: it is not set."""
    sides = [
        dict(flat(find_configuration(what, runs_directory, []).model_dump(mode="json")))
        for what in (one, other)
    ]
    names = [*sides[0], *(name for name in sides[1] if name not in sides[0])]
    found = {
        name: [side.get(name) for side in sides]
        for name in names
        if sides[0].get(name) != sides[1].get(name)
    }
    if as_json:
        print(json.dumps(found, indent=1))
        return
    titles = [one, other] if one != other else [one, f"{other} "]
    rows = [
        {"setting": name, **dict(zip(titles, map(json.dumps, values), strict=True))}
        for name, values in found.items()
    ]
    if rows:
        make_console().print(rows_table(rows, {"setting": "bold"}))
    else:
        print("They are equal.")
    if rows:
        print(f"{plural(len(rows), 'setting')} differ{'s' if len(rows) == 1 else ''}.")
