"""Arguments that several commands take."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from earl_core.system.errors import ConfigError
from flows.cli.completion import complete_checkpoint, complete_recipe, complete_run

Run = Annotated[
    str,
    typer.Argument(help="Name of a run, or its directory.", autocompletion=complete_run),
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
