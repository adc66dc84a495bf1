"""`earl profile`."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console

from earl_core.config import load_config
from flows import server
from flows.cli.display import make_display
from flows.cli.interrupt import Interrupted, leave, run_interruptible, stop_flows
from flows.cli.plan import parse_contexts
from flows.cli.tables import duration, make_console, rows_table


def profile(
    config: str, minutes: float, context: str | None, overrides: list[str], plain: bool
) -> None:
    """Measure candidates through the `profile` flow and print what was found."""
    settings = load_config(config, overrides)
    longest = max(parse_contexts(context)) if context else None
    console = make_console()
    home = server.configure(settings.runs_directory)
    display = make_display(1, plain, console)

    def work() -> dict[str, Any]:
        display.say("starting Prefect")
        prefect_server = server.start(home)
        from flows.profile import profile as profile_flow
        from flows.running import run_flow, set_listener

        prefect_server.ready()
        set_listener(lambda stage, iteration, event: display.say(event["say"]))
        given = {"config": config, "minutes": minutes, "context": longest, "overrides": overrides}
        return run_flow(profile_flow, settings.runs_directory, **given)

    def on_signal() -> None:
        display.warn("Stopping the workers; a second Ctrl-C ends everything at once.")

    try:
        with display:
            result = run_interruptible(work, stop_flows, on_signal)
    except Interrupted as interrupted:
        print("Stopped. What was measured is kept: rerun to continue.", file=sys.stderr)
        leave(interrupted.exit_code)
    print_result(result, minutes, console)


def print_result(result: dict[str, Any], minutes: float, console: Console) -> None:
    """The measured table, what would be chosen by it, and how good the memory model is."""
    spent = duration(result["seconds"])
    if not result["new"]:
        console.print(
            f"\nThis profile is finished: {result['points']} points in {spent}, with nothing left "
            f"that fits {minutes:g} minutes and might change a choice. To measure more, give more "
            "--minutes; to measure again, remove the file.",
            highlight=False,
        )
    console.print(f"\n[bold]Measured[/bold] ({result['points']} points, {spent})")
    console.print(rows_table(result["measured"]))
    if result["choices"]:
        console.print("\n[bold]What live_tokens would choose now[/bold]")
        console.print(rows_table(result["choices"]))
    if result["memory_errors"]:
        console.print("\n[bold]Memory model[/bold], each measured peak predicted from the others")
        console.print(rows_table(result["memory_errors"]))
    for failure in result["failures"]:
        console.print(f"Left out: {failure}", style="yellow", highlight=False, markup=False)
    console.print(f"\nProfile: {result['path']}", highlight=False, soft_wrap=True)
