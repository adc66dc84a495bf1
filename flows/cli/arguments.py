"""Arguments that several commands take."""

from __future__ import annotations

from typing import Annotated

import typer

Run = Annotated[str, typer.Argument(help="Name of a run, or its directory.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Change a setting; may be given several times."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
Plain = Annotated[
    bool, typer.Option("--plain", help="One line per event instead of a live display.")
]
RunsDirectory = Annotated[
    str, typer.Option("--runs-directory", help="Where runs given by name are looked for.")
]
Checkpoint = Annotated[
    str,
    typer.Option(
        "--checkpoint",
        metavar="N|last|initial",
        help="The iteration whose checkpoint is used; initial: the model before training.",
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", min=0.0, help="Sampling temperature; 0: greedy.  As in the run."),
]
