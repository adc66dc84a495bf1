"""Arguments that several commands take, and their completion by the shell: it asks at each press of
the key, so nothing heavy is imported."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from earl_core.system.errors import ConfigError

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


Run = Annotated[
    str, typer.Argument(help="Name of a run, or its directory.", autocompletion=complete_run)
]
Recipe = Annotated[
    str,
    typer.Argument(
        help="A recipe, such as tictactoe_tiny, or a run file.", autocompletion=complete_recipe
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Override a setting; may be given several times."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
Plain = Annotated[
    bool, typer.Option("--plain", help="One line per event instead of a live display.")
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print nothing but warnings and errors, on stderr.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on stdout.")]
JsonLines = Annotated[
    bool,
    typer.Option("--json", help="Print a line of JSON for each iteration and evaluation only."),
]
RunsDirectory = Annotated[
    str, typer.Option("--runs-directory", help="Directory in which runs are found by name.")
]
Checkpoint = Annotated[
    str,
    typer.Option(
        "--checkpoint",
        metavar="N|last|best|initial",
        help="The iteration whose checkpoint is used; best: by the run's evaluations; initial: the "
        "model before training.",
        autocompletion=complete_checkpoint,
    ),
]
Show = Literal["live", "plain", "quiet", "json"]
"""Form in which a command tells of its work."""


def show(plain: bool, quiet: bool, as_json: bool) -> Show:
    """Return the form that these options ask for; refuses --quiet with --json."""
    if quiet and as_json:
        raise ConfigError("--quiet and --json exclude each other: drop one of them")
    return "json" if as_json else "quiet" if quiet else "plain" if plain else "live"


Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature", min=0.0, help="Sampling temperature; 0: greedy. Default: that of the run."
    ),
]
