"""`earl evaluate`."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console

from earl_core.control.policy_player import find_checkpoint
from flows import server
from flows.cli.display import make_display
from flows.cli.interrupt import Interrupted, leave, run_interruptible, stop_flows
from flows.cli.runs import find_run, stored_config
from flows.cli.tables import duration, make_console, rows_table


def evaluate(
    run: tuple[str, str],
    checkpoint: str,
    episodes: int | None,
    temperature: float | None,
    overrides: list[str],
    plain: bool,
) -> None:
    """Play held-out games through the `evaluate` flow and print the outcomes."""
    path = find_run(*run)
    config = stored_config(path, overrides)
    found = find_checkpoint(path, config, checkpoint)
    console = make_console()
    for text in found.damaged:
        console.print(text, style="yellow", highlight=False)
    home = server.configure(config.runs_directory)
    display = make_display(1, plain, console)

    def work() -> dict[str, Any]:
        display.say("starting Prefect")
        prefect_server = server.start(home)
        from flows.evaluate import evaluate as evaluate_flow
        from flows.running import run_flow, set_listener

        prefect_server.ready()
        display.say(f"starting the rollout worker with {found.label}")
        set_listener(display.listen)
        return run_flow(
            evaluate_flow,
            path.parent,
            run=str(path),
            checkpoint=checkpoint,
            episodes=episodes,
            temperature=temperature,
            overrides=overrides,
        )

    try:
        with display:
            result = run_interruptible(work, stop_flows, lambda: display.warn("Stopping."))
            display.say("finished")
    except Interrupted as interrupted:
        print("Stopped; nothing of the evaluation is kept.", file=sys.stderr)
        leave(interrupted.exit_code)
    print_result(result, console)


def print_result(result: dict[str, Any], console: Console) -> None:
    """The outcomes of an evaluation, as a table."""
    metrics = result["metrics"]
    console.print(
        f"\n[bold]{result['run']}[/bold], {result['checkpoint']} (policy version "
        f"{result['policy_version']}): {result['episodes']} held-out games in "
        f"{duration(metrics['seconds'])}",
        highlight=False,
    )
    rows = [
        {
            "outcome": name,
            "games": f"{parts['count']:.0f}",
            "share": f"{parts['share']:.1%}",
            "95 % interval": f"{parts['low']:.1%} - {parts['high']:.1%}",
        }
        for name, parts in result["outcomes"].items()
    ]
    console.print(rows_table(rows))
