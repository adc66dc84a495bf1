"""Names that the shell completes: recipes, run files, runs, checkpoints. Nothing heavy is imported:
the shell asks at each press of the key."""

from __future__ import annotations

import os
from pathlib import Path

import typer

RECIPES = Path(__file__).resolve().parents[2] / "earl_core" / "recipes"


def complete_recipe(incomplete: str) -> list[str]:
    """Recipes, and the run files of the directory that was typed so far."""
    recipes = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    folder = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    files = sorted(str(path) for path in _children(folder) if path.suffix in (".yaml", ".yml"))
    return [name for name in [*recipes, *files] if name.startswith(incomplete)]


def complete_run(context: typer.Context, incomplete: str) -> list[str]:
    """Runs of the runs directory."""
    return [name for name in _runs(context) if name.startswith(incomplete)]


def complete_configuration(context: typer.Context, incomplete: str) -> list[str]:
    """Recipes, run files and runs."""
    return list(dict.fromkeys([*complete_recipe(incomplete), *complete_run(context, incomplete)]))


def complete_checkpoint(context: typer.Context, incomplete: str) -> list[str]:
    """Checkpoints of the run that stands on the line, which is not parsed: its end is missing."""
    words = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
    places = [place for word in words.split() for place in (Path(word), _directory(context) / word)]
    run = next((place for place in places if (place / "config.yaml").is_file()), Path())
    numbers = sorted(int(p.name) for p in _children(run / "checkpoints") if p.name.isdigit())
    return [x for x in ["last", "best", "initial", *map(str, numbers)] if x.startswith(incomplete)]


def _runs(context: typer.Context) -> list[str]:
    return sorted(p.parent.name for p in _directory(context).glob("*/config.yaml"))


def _directory(context: typer.Context) -> Path:
    return Path(str(context.params.get("runs_directory") or "runs"))


def _children(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
