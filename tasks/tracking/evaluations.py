"""The evaluations of a run in MLflow: one table that grows, and a child run for each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from earl_core.dispatch import Manifest
from earl_core.rollout.pass_rates import suite_rows
from earl_core.run import RunDirectory
from tasks.tracking.metric_catalogue import for_mlflow
from tasks.tracking.mlflow_client import MlflowRun, Numbers

TABLE = "evaluation/results.json"


def evaluation_numbers(run: RunDirectory, found: Manifest) -> Numbers:
    """Return the numbers of an evaluation for MLflow; its step is the number of finished
    iterations."""
    metrics = {f"evaluation/{name}": value for name, value in found.metrics.items()}
    seconds = run.stage_path(found.iteration, "evaluation").stat().st_mtime
    return Numbers(found.iteration, for_mlflow(metrics, scored=False), seconds)


def evaluation_rows(evaluations: Sequence[Manifest]) -> list[dict[str, Any]]:
    """A line for the held-out episodes of each evaluation, and one for each suite in it."""
    rows = []
    for found in evaluations:
        metrics = found.metrics
        held_out: dict[str, Any] = {"iterations": found.iteration, "suite": "held-out"}
        for column, name in (("episodes", "episodes"), ("failed", "episodes_failed")):
            if name in metrics:
                held_out[column] = f"{metrics[name]:.0f}"
        if "return/mean" in metrics:
            held_out["return"] = f"{metrics['return/mean']:.3f}"
        for name, part in found.outputs.get("outcomes", {}).items():
            held_out[f"{name} (95 %)"] = "{share:.0%} ({low:.0%}-{high:.0%})".format(**part)
        if len(held_out) > len(("iterations", "suite")):
            rows.append(held_out)
        for row in suite_rows(found.outputs.get("suites", {})):
            rows.append({"iterations": found.iteration, **row})
    return rows


def child_runs(run: RunDirectory, sent: int) -> Iterator[tuple[int, Any]]:
    """Each evaluation after `sent`, and what makes its child run."""
    for found in run.evaluations():
        if found.iteration > sent:
            yield found.iteration, lambda mlflow, found=found: _send(mlflow, run, found)


def _send(mlflow: MlflowRun, run: RunDirectory, found: Manifest) -> None:
    count = found.iteration
    iterations = f"{count} iteration{'' if count == 1 else 's'}"
    child = mlflow.nested(f"{run.uid}/{count}", f"evaluation after {iterations}")
    parameters = {"evaluation.iterations": str(count), "run": run.config.name}
    child.describe(parameters, {"mlflow.source.name": "earl"})
    child.log_numbers([evaluation_numbers(run, found)])
    if rows := evaluation_rows([found]):
        child.log_table(rows, TABLE)
    child.end("FINISHED")
