"""Runs side by side, as numbers and texts: for the page and for the terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from earl_core.comparison import EqualPrompt, RecordedRun, differing_settings, equal_prompts
from earl_core.deployment.stages import STAGES
from earl_core.run.record import FORKED
from earl_core.secrets import shareable_tree
from earl_core.system.errors import ConfigError
from tasks.reports.intervals import half_interval
from tasks.reports.lines import Line, mean_return, return_text, signed, total_seconds
from tasks.reports.run_page.records import RunRecords, read_records

_SECONDS = "stage_seconds"
_NOT_SET = "not set"


class StageSeconds(NamedTuple):
    """Seconds that a stage takes in an iteration. error: half of the mean's 95 % interval, None of
    a single iteration."""

    mean: float
    error: float | None
    iterations: int


@dataclass(frozen=True)
class Compared:
    """Runs side by side. labels: how people call them. settings: those that differ, as texts, by
    dotted name. seconds: by stage, None where a run has not that stage. prompts: that all have
    played. damaged: what is wrong with files that could not be read."""

    labels: list[str]
    records: list[RunRecords]
    settings: dict[str, list[str]]
    seconds: dict[str, list[StageSeconds | None]]
    prompts: list[EqualPrompt]
    damaged: list[str]


def compare(
    runs: Sequence[RecordedRun],
    lines: Sequence[tuple[Sequence[Line], Sequence[Line]]],
    most_prompts: int,
    most_episodes: int,
) -> Compared:
    """Put runs side by side. lines: iterations and evaluations of each, ascending.

    Raises `ConfigError` for runs that have no metric in common, and for rules of redaction that
    leave nothing.
    """
    without_common_metric(runs, lines)
    prompts, damaged = equal_prompts(runs, most_prompts, most_episodes)
    for run in runs:
        run.redaction.check_something_left()
    settings = differing_settings([run.config for run in runs])
    shown = {name: [_text(value) for value in values] for name, values in settings.items()}
    iterations = [each[0] for each in lines]
    return Compared(
        labels=[run.label for run in runs],
        records=[read_records(run.path, *own) for run, own in zip(runs, lines, strict=True)],
        settings=shareable_tree(shown),
        seconds={
            stage: found
            for stage in STAGES
            if any(found := [stage_seconds(each, stage) for each in iterations])
        },
        prompts=prompts,
        damaged=shareable_tree(damaged),
    )


def _text(value: Any) -> str:
    return _NOT_SET if value is None else json.dumps(value, ensure_ascii=False)


def without_common_metric(
    runs: Sequence[RecordedRun], lines: Sequence[tuple[Sequence[Line], Sequence[Line]]]
) -> None:
    """Raise `ConfigError` for runs that share no metric."""
    measured = [
        {
            (kind, name)
            for kind, own in enumerate(each)
            for line in own
            for name in line
            if name not in ("iteration", "time")
        }
        for each in lines
    ]
    if set.intersection(*measured):
        return
    empty = [run.label for run, names in zip(runs, measured, strict=True) if not names]
    why = (
        f"{' and '.join(empty)} {'has' if len(empty) == 1 else 'have'} finished no iteration"
        if empty
        else "they measure other things"
    )
    labels = ", ".join(run.label for run in runs)
    raise ConfigError(f"{labels} have no metric in common, for {why}: name runs that share some")


def stage_seconds(iterations: Sequence[Line], stage: str) -> StageSeconds | None:
    """The mean over a run's iterations; None where none has the stage."""
    values = [
        float(line[f"{stage}/{_SECONDS}"]) for line in iterations if f"{stage}/{_SECONDS}" in line
    ]
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    return StageSeconds(mean, half_interval(spread, len(values)), len(values))


def facts(label: str, records: RunRecords) -> dict[str, str]:
    """What a reader looks for first of one run, by name."""
    lines, evaluations, config = records.iterations, records.evaluations, records.config
    measured = [line for line in evaluations if mean_return(line) is not None]
    best = max(measured, key=lambda line: mean_return(line) or 0.0, default=None)
    played = [config.environment] if config.environment else config.environments
    seconds = [total_seconds(line) for line in lines]
    return {
        "run": label,
        "state": records.state,
        "iterations": f"{len(lines)} of {config.iterations}",
        "last return": signed(mean_return(lines[-1]), 3) if lines else "",
        "held out, last": return_text(measured[-1]) if measured else "",
        "held out, best": return_text(best) if best else "",
        "seconds of an iteration": f"{math.fsum(seconds) / len(seconds):.1f}" if seconds else "",
        "model": config.model.shown,
        "environment": ", ".join(each.played for each in played),
        "engine": config.rollout.engine,
        "forked from": str(records.record.get(FORKED, {}).get("from", "")),
    }
