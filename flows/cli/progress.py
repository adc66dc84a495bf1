"""What a display knows of a run: fed by the flow's events, read by whoever draws it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

OUTCOMES = ("win", "draw", "loss", "illegal")
"""Shown first, in this order, whatever other outcomes an environment has."""

_REMEMBERED = 8


@dataclass(frozen=True)
class IterationRow:
    """The numbers of one finished iteration. Shares are in [0, 1]; None: not measured."""

    iteration: int
    mean_return: float | None
    outcomes: dict[str, float]
    context_mean: float | None
    context_max: float | None
    rollout_tokens_per_second: float | None
    update_tokens_per_second: float | None
    seconds: float

    @classmethod
    def of(cls, iteration: int, metrics: Mapping[str, Any]) -> IterationRow:
        """From the metrics of an iteration, `stage/name` each, as metrics.jsonl holds them."""
        prefix = "rollout/outcome/"
        return cls(
            iteration=iteration,
            mean_return=_number(metrics, "rollout/return/mean", "reward/mean"),
            outcomes={
                name.removeprefix(prefix): float(value)
                for name, value in metrics.items()
                if name.startswith(prefix)
            },
            context_mean=_number(metrics, "rollout/context/mean"),
            context_max=_number(metrics, "rollout/context/max"),
            rollout_tokens_per_second=_number(metrics, "rollout/tokens_per_second"),
            update_tokens_per_second=_number(metrics, "update/tokens_per_second"),
            seconds=sum(
                float(value) for name, value in metrics.items() if name.endswith("/stage_seconds")
            ),
        )


@dataclass(frozen=True)
class EvaluationRow:
    """One held-out evaluation: outcome → (share, low, high), 95 % intervals."""

    version: int
    mean_return: float | None
    outcomes: dict[str, tuple[float, float, float]]

    @classmethod
    def of(cls, version: int, metrics: Mapping[str, Any]) -> EvaluationRow:
        """From an evaluation's metrics, `outcome/<name>/{share,low,high}` among them."""
        names = [
            name.removeprefix("outcome/").removesuffix("/share")
            for name in metrics
            if name.startswith("outcome/") and name.endswith("/share")
        ]
        return cls(
            version=version,
            mean_return=_number(metrics, "return/mean"),
            outcomes={
                name: (
                    float(metrics[f"outcome/{name}/share"]),
                    float(metrics.get(f"outcome/{name}/low", 0.0)),
                    float(metrics.get(f"outcome/{name}/high", 1.0)),
                )
                for name in names
            },
        )


@dataclass(frozen=True)
class Activity:
    """What is going on now."""

    stage: str = ""
    iteration: int = 0
    preparing: str = ""
    done: float | None = None
    total: float | None = None
    numbers: dict[str, float] = field(default_factory=dict)
    since: float = field(default_factory=time.monotonic)

    @property
    def text(self) -> str:
        """A few words, such as `rollout` or `rollout: starting the update worker`."""
        return ": ".join(part for part in (self.stage, self.preparing) if part)


@dataclass(frozen=True)
class Snapshot:
    """A consistent copy of a `Progress`."""

    iterations: int
    finished: int
    activity: Activity
    rows: tuple[IterationRow, ...]
    evaluations: tuple[EvaluationRow, ...]
    seconds: float
    iteration_seconds: float | None


class Progress:
    """Gathers the flow's events; `handle` may be called from any thread."""

    def __init__(self, iterations: int) -> None:
        self.iterations = iterations
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._finished = 0
        self._finish_times: deque[float] = deque(maxlen=_REMEMBERED)
        self._activity = Activity(stage="starting")
        self._rows: deque[IterationRow] = deque(maxlen=_REMEMBERED)
        self._evaluations: list[EvaluationRow] = []

    def recall(self, rows: Sequence[IterationRow], evaluations: Sequence[EvaluationRow]) -> None:
        """Begin with what earlier attempts of the run have done."""
        with self._lock:
            self._rows.extend(rows)
            self._evaluations.extend(evaluations)
            self._finished = rows[-1].iteration + 1 if rows else 0

    def say(self, text: str) -> None:
        """Show something that is not a stage."""
        with self._lock:
            self._activity = Activity(stage=text)

    def handle(self, stage: str, iteration: int, event: Mapping[str, Any]) -> None:
        """Take one event of the flow, as `earl_core.control.worker_groups.Progress`."""
        with self._lock:
            if event.get("finished"):
                self._finish(stage, iteration, event.get("metrics", {}))
            elif getting := getting_model(event):
                self._activity = Activity(stage=getting)
            elif layout_news(iteration, event):
                # A line that stays; what goes on goes on.
                return
            elif preparing := preparation(event):
                self._activity = replace(self._activity, preparing=preparing)
            elif event.get("stage_started"):
                self._activity = Activity(stage=stage, iteration=iteration)
            elif "metrics" not in event:
                self._advance(stage, iteration, event)

    def _finish(self, stage: str, iteration: int, metrics: Mapping[str, Any]) -> None:
        if stage == "evaluation":
            self._evaluations.append(EvaluationRow.of(iteration, metrics))
        elif stage == "iteration":
            self._finished = iteration + 1
            self._finish_times.append(time.monotonic())
            repeated = [row for row in self._rows if row.iteration >= iteration]
            for row in repeated:
                self._rows.remove(row)
            self._rows.append(IterationRow.of(iteration, metrics))

    def _advance(self, stage: str, iteration: int, event: Mapping[str, Any]) -> None:
        numbers = {
            name: float(value) for name, value in event.items() if isinstance(value, int | float)
        }
        done, total = None, None
        for unit in ("episodes", "samples"):
            if f"{unit}_done" in numbers:
                done, total = numbers[f"{unit}_done"], numbers.get(unit)
        now = self._activity
        since = now.since if now.stage == stage else time.monotonic()
        self._activity = Activity(stage, iteration, "", done, total, numbers, since)

    def snapshot(self) -> Snapshot:
        """Everything, at one moment."""
        with self._lock:
            times = self._finish_times
            pace = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
            return Snapshot(
                iterations=self.iterations,
                finished=self._finished,
                activity=self._activity,
                rows=tuple(self._rows),
                evaluations=tuple(self._evaluations),
                seconds=time.monotonic() - self._started,
                iteration_seconds=pace,
            )


def getting_model(event: Mapping[str, Any]) -> str:
    """What an event says about a model that is made first; empty: nothing."""
    if "downloading" in event:
        return f"downloading the model {event['downloading']} from the model hub"
    return f"building the model {event['building']}" if "building" in event else ""


def preparation(event: Mapping[str, Any]) -> str:
    """What an event says about workers that a stage waits for; empty: nothing."""
    if "starting" in event:
        return f"starting the {event['starting']} worker"
    if "laying_out" in event:
        return f"laying the {event['laying_out']} out anew"
    return ""


def layout_news(iteration: int, event: Mapping[str, Any]) -> str:
    """A line about a stage that is laid out otherwise, or repeated because it did not fit; empty:
    the event says nothing of the kind."""
    told = event.get("switched") or event.get("repeated")
    return f"iteration {iteration}: {told}" if told else ""


def outcome_names(rows: list[dict[str, Any]]) -> list[str]:
    """All outcomes that occur, the games' first."""
    found = {name for row in rows for name in row}
    return [name for name in OUTCOMES if name in found] + sorted(found - set(OUTCOMES))


def _number(metrics: Mapping[str, Any], *names: str) -> float | None:
    for name in names:
        if name in metrics:
            return float(metrics[name])
    return None
