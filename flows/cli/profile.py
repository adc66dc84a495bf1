"""`earl profile`."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from earl_core.config import load_config
from earl_core.system.plural import plural
from flows.cli.display import make_display
from flows.cli.flow_command import FlowCommand
from flows.cli.plan_arguments import parse_contexts
from flows.cli.tables import duration, make_console, rows_table


def profile(
    config: str, minutes: float, context: str | None, overrides: list[str], plain: bool
) -> None:
    """Measure candidates through the `profile` flow and print what was found."""
    settings = load_config(config, overrides)
    longest = max(parse_contexts(context)) if context else None
    console = make_console()
    result = FlowCommand(settings.runs_directory).run(
        "profile",
        make_display(console, "plain" if plain else "live"),
        lambda: "Stopped. What was measured is kept: rerun to continue.",
        config=config,
        minutes=minutes,
        context=longest,
        overrides=overrides,
    )
    print_result(result, minutes, console)


def print_result(result: dict[str, Any], minutes: float, console: Console) -> None:
    """The measured table, what would be chosen by it, and how good the memory model is."""
    spent, points = duration(result["seconds"]), plural(result["points"], "point")
    if not result["new"]:
        console.print(
            f"\nThis profile is finished: {points} in {spent}, with nothing left that "
            f"fits {minutes:g} minutes and might change a choice. To measure more, give more "
            "--minutes; to measure again, remove the file."
        )
    console.print(Text.assemble(("\nMeasured", "bold"), f" ({points}, {spent})"))
    console.print(rows_table(result["measured"]))
    if result["choices"]:
        console.print("\nWhat live_tokens would choose now", style="bold")
        console.print(rows_table(result["choices"]))
    if result["memory_errors"]:
        heading = ("\nMemory model", "bold")
        console.print(Text.assemble(heading, ", each measured peak predicted from the others"))
        console.print(rows_table(result["memory_errors"]))
    for failure in result["failures"]:
        console.print(f"Left out: {failure}", style="yellow")
    console.print(f"\nProfile: {result['path']}", soft_wrap=True)
