"""Bringing a run's record to MLflow and keeping it complete; synchronous, raises when it fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from earl_core.config import dump_config
from earl_core.dispatch import ManifestError
from earl_core.run import RunDirectory
from earl_core.secrets import redact
from earl_core.selector import Hardware
from tasks.reports.selector_chart import selector_chart
from tasks.tracking import details
from tasks.tracking.mlflow_client import METRICS_PER_CALL, MlflowRun, Numbers, open_mlflow_run
from tasks.tracking.outbox import Chart, Checkpoint, Item, Plan, Trace
from tasks.tracking.traces import episode_trace

Waiting = Callable[[str], set[int]]
"""Which steps of a kind are queued."""


class Delivery:
    """What one Tracker's thread does with MLflow. `connect` comes first, and again after a
    failure: the run may be another one, or gone, on a server that came back."""

    def __init__(self, run: RunDirectory, hardware: Hardware, uri: str) -> None:
        self._run = run
        self._hardware = hardware
        self._uri = uri
        self._client: MlflowRun | None = None
        self._refused: set[tuple[str, int]] = set()
        self._restored: dict[str, Numbers] = {}

    @property
    def connected(self) -> bool:
        """Whether `connect` succeeded since the last `disconnect`."""
        return self._client is not None

    @property
    def run_id(self) -> str:
        """MLflow's id of the run."""
        return self._mlflow.run_id

    @property
    def experiment_id(self) -> str:
        """MLflow's id of the experiment."""
        return self._mlflow.experiment_id

    @property
    def _mlflow(self) -> MlflowRun:
        if self._client is None:
            raise RuntimeError("connect to MLflow first")
        return self._client

    def connect(self) -> None:
        """Find the run of an earlier attempt, or create it, and say what and where it is."""
        run, config = self._run, self._run.config
        uri, record = redact(self._uri), run.record.get("tracking") or {}
        known = record.get("run_id") if record.get("uri") == uri else None
        client = open_mlflow_run(self._uri, config.tracking.experiment, config.name, run.uid, known)
        tags = details.tags(run.path, run.uid, self._hardware)
        tags["earl.attempt"] = str(run.attempt)
        client.describe(details.parameters(config), tags)
        self._client = client

    def disconnect(self) -> None:
        """After a failure."""
        self._client = None

    def record_ids(self) -> None:
        """Write into run.json where this run is tracked, for the next attempt."""
        ids = {
            "uri": redact(self._uri),
            "run_id": self.run_id,
            "experiment_id": self.experiment_id,
        }
        if self._run.record.get("tracking") != ids:
            self._run.update_record(tracking=ids)

    def alive(self) -> bool:
        """Whether MLflow answers and still knows this run."""
        return self._mlflow.alive()

    def end(self, status: str) -> None:
        """Set the run's final status."""
        self._mlflow.end(status)

    def send_config(self) -> None:
        """The resolved configuration as an artifact."""
        self._mlflow.log_text(dump_config(self._run.config), "config.yaml")

    def refuse(self, items: Sequence[Item]) -> None:
        """Never try these steps again."""
        self._refused |= {(i.kind, i.step) for i in items if isinstance(i, Numbers)}

    def restore(self, waiting: Waiting) -> None:
        """Send the steps that the run directory has, MLflow lacks, and the queue has not."""
        for kind, read in (("iteration", self._iterations), ("evaluation", self._evaluations)):
            rows = read()
            if not rows:
                continue
            # Asked after reading: what is written is queued next, and is then seen here or there.
            queued = waiting(kind)
            there = self._mlflow.steps(kind) | queued
            missing = [
                r for r in rows if r.step not in there and (kind, r.step) not in self._refused
            ]
            while missing:
                count = max(1, METRICS_PER_CALL // (len(missing[0].metrics) + 1))
                part, missing = missing[:count], missing[count:]
                self._mlflow.log_numbers(part)
                self._restored[kind] = part[-1]

    def deliver(self, items: Sequence[Item]) -> None:
        """Send what `Outbox.head` chose."""
        numbers = [i for i in items if isinstance(i, Numbers) and not self._is_restored(i)]
        if numbers:
            self._mlflow.log_numbers(numbers)
        for item in items:
            if isinstance(item, Plan):
                if item.switched:
                    text = json.dumps(item.plan, indent=1, default=str)
                    self._mlflow.log_text(text, f"plans/{item.iteration:06d}.json")
                self._mlflow.set_tags(details.plan_reasons(item.plan))
            elif isinstance(item, Chart):
                drawn = selector_chart(self._run.metrics())
                if drawn:
                    self._mlflow.log_text(drawn, "charts/predicted_and_measured.svg")
            elif isinstance(item, Checkpoint):
                path, iteration = str(item.path.resolve()), str(item.iteration)
                self._mlflow.set_tags({"checkpoint": path, "checkpoint.iteration": iteration})
            elif isinstance(item, Trace):
                trace = episode_trace(self._run.uid, item.iteration, item.example, item.seconds)
                self._mlflow.log_trace(trace)

    def _is_restored(self, numbers: Numbers) -> bool:
        """Whether `restore` found it in the run directory just before it was queued."""
        last = self._restored.get(numbers.kind)
        return last is not None and last.step == numbers.step and last.finite() == numbers.finite()

    def _iterations(self) -> list[Numbers]:
        rows = []
        for row in self._run.metrics():
            metrics = {name: row[name] for name in row if name not in ("iteration", "time")}
            rows.append(Numbers("iteration", int(row["iteration"]), metrics, float(row["time"])))
        return rows

    def _evaluations(self) -> list[Numbers]:
        rows = []
        for path in sorted((self._run.path / "iterations").glob("*/evaluation.json")):
            try:
                found = self._run.manifest(int(path.parent.name), "evaluation")
                seconds = path.stat().st_mtime
            except (ManifestError, OSError, ValueError):
                continue
            metrics = {f"evaluation/{name}": value for name, value in found.metrics.items()}
            rows.append(Numbers("evaluation", found.iteration, metrics, seconds))
        return rows
