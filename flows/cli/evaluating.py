"""`earl evaluate`."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.text import Text

from earl_core.control.policy_player import find_checkpoint
from earl_core.run.record import stored_config
from earl_core.system.plural import plural
from flows.cli.arguments import Show
from flows.cli.display import make_display
from flows.cli.flow_command import FlowCommand
from flows.cli.found_runs import find_run
from flows.cli.tables import duration, make_console, rows_table
from tasks.reports.lines import limit_shares
from tasks.reports.suite_table import suite_rows


def evaluate(
    run: tuple[str, str],
    checkpoint: str,
    episodes: int | None,
    temperature: float | None,
    overrides: list[str],
    show: Show,
) -> None:
    """Play held-out games through the `evaluate` flow and print the outcomes."""
    path = find_run(*run)
    config = stored_config(path, overrides)
    found = find_checkpoint(path, config, checkpoint)
    console = make_console(quiet=show in ("quiet", "json"))
    for text in found.damaged:
        console.print(text, style="yellow")
    result = FlowCommand(config.runs_directory).run(
        "evaluate",
        make_display(console, show),
        lambda: "Stopped; nothing of the evaluation is kept.",
        run=str(path),
        checkpoint=checkpoint,
        episodes=episodes,
        temperature=temperature,
        overrides=overrides,
    )
    if show == "json":
        print(json.dumps({"kind": "evaluation", **result}))
    else:
        print_result(result, make_console())


def print_result(result: dict[str, Any], console: Console) -> None:
    """The outcomes of an evaluation, and its suites, as tables."""
    metrics = result["metrics"]
    console.print(
        Text.assemble(
            (f"\n{result['run']}", "bold"),
            f", {result['checkpoint']} (policy version {result['policy_version']}): "
            f"{plural(result['episodes'], 'held-out game')} in {duration(metrics['seconds'])}",
        )
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
    rows += [
        {
            "outcome": f"ended by the {name}",
            "games": f"{share * result['episodes']:.0f}",
            "share": f"{share:.1%}",
        }
        for name, share in limit_shares(metrics).items()
    ]
    console.print(rows_table(rows))
    if result["suites"]:
        console.print(rows_table(suite_rows(result["suites"])))
