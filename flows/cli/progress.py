"""What a display knows of a run: fed by the flow's events, read by whoever draws it."""

from __future__ import annotations

import re
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
        shares = (re.fullmatch("outcome/(.+)/share", name) for name in metrics)
        names = [found[1] for found in shares if found]
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
    """What is going on now, and the numbers that were last said of it."""

    stage: str = ""
    preparing: str = ""
    numbers: dict[str, float] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """A few words, such as `rollout` or `rollout: starting the update worker`."""
        return ": ".join(part for part in (self.stage, self.preparing) if part)

    @property
    def unit(self) -> str:
        """What is counted: `episodes`, `samples`, or nothing."""
        return next((u for u in ("episodes", "samples") if f"{u}_done" in self.numbers), "")

    @property
    def done(self) -> float:
        """How many of them are done."""
        return self.numbers.get(f"{self.unit}_done", 0.0)

    @property
    def total(self) -> float:
        """How many there are; 0 where that is not known."""
        return self.numbers.get(self.unit, 0.0)


@dataclass(frozen=True)
class Snapshot:
    """What a `Progress` knows, at one moment. iteration_seconds: the pace of the last ones."""

    iterations: int
    finished: int = 0
    activity: Activity = Activity("starting")
    rows: tuple[IterationRow, ...] = ()
    evaluations: tuple[EvaluationRow, ...] = ()
    seconds: float = 0.0
    iteration_seconds: float | None = None


class Progress:
    """Gathers the flow's events; `handle` may be called from any thread."""

    def __init__(self, iterations: int) -> None:
        self._lock = threading.RLock()
        self._started = time.monotonic()
        self._finish_times: deque[float] = deque(maxlen=_REMEMBERED)
        self._now = Snapshot(iterations)

    def recall(self, rows: Sequence[IterationRow], evaluations: Sequence[EvaluationRow]) -> None:
        """Begin with what earlier attempts of the run have done."""
        finished = rows[-1].iteration + 1 if rows else 0
        self._note(
            rows=tuple(rows[-_REMEMBERED:]), evaluations=tuple(evaluations), finished=finished
        )

    def say(self, text: str) -> None:
        """Show something that is not a stage."""
        self._note(activity=Activity(text))

    def _note(self, **changed: Any) -> None:
        with self._lock:
            self._now = replace(self._now, **changed)

    def handle(self, stage: str, iteration: int, event: Mapping[str, Any]) -> None:
        """Take one event of the flow, as `earl_core.control.worker_groups.Progress`."""
        with self._lock:
            self._handle(stage, iteration, event)

    def _handle(self, stage: str, iteration: int, event: Mapping[str, Any]) -> None:
        metrics = event.get("metrics", {})
        if event.get("finished") and stage == "evaluation":
            made = EvaluationRow.of(iteration, metrics)
            self._note(evaluations=(*self._now.evaluations, made))
        elif event.get("finished") and stage == "iteration":
            self._finish_times.append(time.monotonic())
            rows = [row for row in self._now.rows if row.iteration < iteration]
            rows.append(IterationRow.of(iteration, metrics))
            self._note(rows=tuple(rows[-_REMEMBERED:]), finished=iteration + 1)
        elif event.get("finished") or switch_line(iteration, event):
            return  # a line that stays says it; what goes on goes on
        elif "downloading" in event or "building" in event:
            self.say(preparation(event))
        elif preparing := preparation(event):
            self._note(activity=replace(self._now.activity, preparing=preparing))
        elif event.get("stage_started"):
            self.say(stage)
        elif "metrics" not in event:
            numbers = {k: float(v) for k, v in event.items() if isinstance(v, int | float)}
            self._note(activity=Activity(stage, "", numbers))

    def snapshot(self) -> Snapshot:
        """Everything, at one moment."""
        times = list(self._finish_times)
        return replace(
            self._now,
            seconds=time.monotonic() - self._started,
            iteration_seconds=(times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None,
        )


_PREPARATIONS = {
    "starting": "starting the {} worker",
    "resharding": "resharding the {}",
    "downloading": "downloading the model {} from the model hub",
    "building": "building the model {}",
}


def preparation(event: Mapping[str, Any]) -> str:
    """What an event says about workers or a model that a stage waits for; empty: nothing."""
    return next((form.format(event[k]) for k, form in _PREPARATIONS.items() if k in event), "")


def switch_line(iteration: int, event: Mapping[str, Any]) -> str:
    """A line about a stage that takes another stage deployment, or is repeated; empty: the event
    says nothing of the kind."""
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
