"""Orchestration: the part of an iteration's wall time that is spent outside of every stage body.

orchestration_seconds: flow wall time - time inside stage bodies; orchestration_share: that over the
wall time. Medians of iterations 3 to 8. `earl train` runs as it always does; the times come from
the ledger and the metrics that every run keeps. The alternative is the same graph as synchronous
Prefect flows with default settings and empty tasks. The limit is zero: a loop that does nothing but
the stages.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from earl_core.deployment.stages import STAGES
from tools.harness import REPOSITORY, Report, Row, interval, median, parser, publish
from tools.iterations import IterationTime, read_iterations
from tools.process_tree import TIMEOUT_SECONDS
from tools.process_tree import train as run_train

MEASURED = range(3, 9)
_ALTERNATIVE = (
    "import json; from benchmarks.overhead import alternative; print(json.dumps(alternative(4)))"
)
_QUICK = (
    "rollout.prompts_per_iteration=4",
    "evaluation.every=0",
    "checkpoint.every=3",
    "model.builder_options.warm_start_steps=10",
)


def main() -> None:
    options = _options()
    report = Report("overhead", "Orchestration share of an iteration")
    with tempfile.TemporaryDirectory(prefix="earl-overhead-") as name:
        scratch = Path(name)
        run = options.run or train(options.config, options.set, scratch)
        found = read_iterations(run, MEASURED)
        if not found:
            raise SystemExit(
                f"{run} has none of the iterations {MEASURED[0]} to {MEASURED[-1]} done in one "
                "attempt: run it for at least nine iterations without a stop"
            )
        alternative = time_alternative(scratch)
    fill(report, found, alternative)
    what = f"the run {options.run}" if options.run else str(options.config)
    report.notes.insert(0, f"Measured on {what}, iterations {[item.number for item in found]}.")
    if options.quick:
        report.notes.append(
            "--quick: the tiny model, whose iterations are short, with few games; its share is "
            "far above that of the demo and says nothing about it."
        )
    publish(report, options)


def train(config: Path, overrides: list[str], scratch: Path) -> Path:
    """Run the configuration up to the last measured iteration; its run directory."""
    settings = ["name=measured", f"runs_directory={scratch / 'runs'}", *overrides]
    if set(_QUICK) <= set(overrides):
        settings.append(f"model.path={scratch / 'model'}")  # built anew, hardly warmed up
    run_train(config, [*settings, f"iterations={MEASURED[-1] + 1}"], scratch)
    return scratch / "runs" / "measured"


def time_alternative(scratch: Path) -> list[float]:
    """Seconds per iteration of the same graph as synchronous flows with empty tasks."""
    environment = {
        **os.environ,
        "PREFECT_HOME": str(scratch / "alternative"),
        "PREFECT_LOGGING_LEVEL": "ERROR",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "DO_NOT_TRACK": "1",
    }
    # In a process of its own, which has a Prefect of its own.
    command = [sys.executable, "-c", _ALTERNATIVE]
    answer = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        timeout=TIMEOUT_SECONDS,
    )
    seconds: list[float] = json.loads(answer.stdout.splitlines()[-1])
    return seconds[1:]  # the first one warms up


def alternative(iterations: int) -> list[float]:
    """Seconds of each iteration, straightforwardly put into Prefect: default tasks that are empty,
    one after another, for every stage but the optional ones."""
    from prefect import flow, task

    @task
    def stage(name: str, number: int, before: str | None) -> str:
        return f"{name} {number} after {before}"

    @flow(log_prints=False)
    def iteration(number: int) -> str:
        last: str | None = None
        for name, each in STAGES.items():
            if not (each.optional or each.imitates):
                last = stage.submit(name, number, last).result()
        return last or ""

    @flow(log_prints=False)
    def train() -> list[float]:
        seconds = []
        for number in range(iterations):
            started = time.perf_counter()
            iteration(number)
            seconds.append(time.perf_counter() - started)
        return seconds

    return train()


def fill(report: Report, found: list[IterationTime], alternative: list[float]) -> None:
    """Rows: the stages, what is left, and the alternative, each as seconds and as a share."""
    wall = median([item.wall for item in found])
    stages = list(dict.fromkeys(stage for item in found for stage in item.stages))
    for stage in stages:
        values = [item.stages[stage] for item in found if stage in item.stages]
        shares = [item.stages[stage] / item.wall for item in found if stage in item.stages]
        report.rows.append(_row(f"stage body: {stage}", values, shares))
    outside = [item.wall - item.inside for item in found]
    report.rows.append(_row("whole iteration", [item.wall for item in found], [1.0]))
    report.rows.append(
        _row("EARL: outside of stage bodies", outside, [item.share for item in found])
    )
    inside = median([item.inside for item in found])
    report.rows.append(
        _row(
            "alternative: synchronous Prefect flows, empty tasks",
            alternative,
            [seconds / (inside + seconds) for seconds in alternative],
        )
    )
    report.rows.append(
        {"what": "limit: only the stages", "seconds": 0.0, "share of wall": 0.0, "share range": ""}
    )
    report.headline["orchestration_seconds"] = median(outside)
    report.headline["orchestration_share"] = median([item.share for item in found])
    report.notes.append(
        f"An iteration took {wall:.2f} s; with empty tasks as synchronous Prefect flows EARL's "
        f"{median(outside):.3f} s outside of the stages would have been {median(alternative):.3f} "
        "s, without checkpoints, metrics, artifacts or tracking."
    )
    report.notes.append("Medians over the iterations; evaluations between them are left out.")


def _row(what: str, seconds: list[float], shares: list[float]) -> Row:
    return {
        "what": what,
        "seconds": median(seconds),
        "share of wall": median(shares),
        "share range": interval(shares),
    }


def _options() -> argparse.Namespace:
    made = parser("The part of an iteration that is not spent in its stages.", overrides=True)
    made.add_argument("--config", type=Path, help="default: the recipe demo, unchanged")
    made.add_argument("--run", type=Path, help="read this run's directory instead of training")
    options = made.parse_args()
    if options.config is None:
        file = "tictactoe_tiny" if options.quick else "demo"
        options.config = Path("earl_core/recipes") / f"{file}.yaml"
        if options.quick:
            options.set = [*_QUICK, *options.set]
    return options


if __name__ == "__main__":
    main()
