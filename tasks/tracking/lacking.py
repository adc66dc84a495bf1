"""What the run directory holds and MLflow lacks: the run directory is the tracker's queue.

Each thing has a key, its kind and its iteration. Things of a kind are sent in the order of their
iterations, so that the last one sent of each kind says all that MLflow has. MLflow itself holds
these numbers, in the tag `earl.sent`: a run that is new there gets everything, also after a server
was lost.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from earl_core.config import dump_config
from earl_core.dispatch import ManifestError
from earl_core.rollout.pass_rates import suite_rows
from earl_core.run import RunDirectory
from earl_core.run.episodes import EpisodesDamaged, read_episodes
from tasks.reports.selector_chart import selector_chart
from tasks.tracking.mlflow_client import METRICS_PER_CALL, MlflowRun, Numbers
from tasks.tracking.traces import episode_trace

logger = logging.getLogger("earl.tracking")

SENT = "earl.sent"

_CHART_EVERY = 5

Send = Callable[[MlflowRun], None]


class Thing(NamedTuple):
    """Something of a kind, up to and with an iteration. send: None where there is none of it."""

    kind: str
    iteration: int
    send: Send | None


def sent_before(run: RunDirectory, tags: Mapping[str, str]) -> dict[str, int]:
    """The last iteration sent of each kind, by the tags of the MLflow run; empty where the run has
    gone back since: what it did again is of another past. What arrived keeps its time, and is the
    same to MLflow when it comes again."""
    found = json.loads(tags.get(SENT, "{}"))
    return found if found.pop("past", 0) == _past(run) else {}


def state_tags(run: RunDirectory, sent: Mapping[str, int]) -> dict[str, str]:
    """What is true of the run now: its plan's reasons, its newest checkpoint, what was sent."""
    tags = {SENT: json.dumps({**sent, "past": _past(run)}, sort_keys=True)}
    reasons = _plan(run, sent.get("metrics", -1)).get("reasons", {})
    tags |= {f"plan.{stage}": str(reason) for stage, reason in reasons.items()}
    stable = run.last_stable()
    if stable >= 0:
        tags["checkpoint"] = str(run.checkpoint_path(stable).resolve())
        tags["checkpoint.iteration"] = str(stable)
    return tags


def lacking(run: RunDirectory, sent: Mapping[str, int]) -> Iterator[Thing]:
    """What is to be sent, in order. sent: as of `sent_before`."""
    if sent.get("config.yaml", -1) < run.attempt:
        text = dump_config(run.config)
        yield Thing("config.yaml", run.attempt, lambda mlflow: mlflow.log_text(text, "config.yaml"))
    rows = run.metrics()
    for kind, numbers in (("metrics", _iterations(rows)), ("evaluation", _evaluations(run))):
        yield from _batches(kind, [each for each in numbers if each.step > sent.get(kind, -1)])
    finished = [int(row["iteration"]) for row in rows]
    for kind, thing in (("plan", _new_layout), ("trace", _traces)):
        for iteration in finished:
            if iteration > sent.get(kind, -1):
                yield Thing(kind, iteration, thing(run, iteration))
    yield from _suites(run, sent.get("suites", -1))
    whole = run.config.iterations
    drawn = [k for k in finished if (k + 1) % _CHART_EVERY == 0 or k + 1 >= whole]
    if drawn and drawn[-1] > sent.get("chart", -1):
        yield Thing("chart", drawn[-1], _chart(rows))


def _past(run: RunDirectory) -> int:
    """How often the run went back to an earlier checkpoint."""
    return sum(1 for _ in (run.path / "set_aside").glob("[0-9]*"))


def _iterations(rows: Sequence[Mapping[str, Any]]) -> Iterator[Numbers]:
    for row in rows:
        metrics = {name: row[name] for name in row if name not in ("iteration", "time")}
        yield Numbers(int(row["iteration"]), metrics, float(row["time"]))


def _evaluations(run: RunDirectory) -> Iterator[Numbers]:
    for found in run.evaluations():
        metrics = {f"evaluation/{name}": value for name, value in found.metrics.items()}
        seconds = run.stage_path(found.iteration, "evaluation").stat().st_mtime
        yield Numbers(found.iteration, metrics, seconds)


def _suites(run: RunDirectory, sent: int) -> Iterator[Thing]:
    """One table of all evaluations, whenever it has grown."""
    rows, last = [], -1
    for found in run.evaluations():
        for row in suite_rows(found.outputs.get("suites", {})):
            rows.append({"iteration": found.iteration, **row})
            last = found.iteration
    if last > sent:
        yield Thing("suites", last, lambda mlflow: mlflow.log_table(rows, "evaluation/suites.json"))


def _batches(kind: str, numbers: list[Numbers]) -> Iterator[Thing]:
    """As many steps in a call as it may hold."""
    while numbers:
        count = max(1, METRICS_PER_CALL // max(1, len(numbers[0].metrics)))
        part, numbers = numbers[:count], numbers[count:]
        yield Thing(kind, part[-1].step, lambda mlflow, part=part: mlflow.log_numbers(part))  # type: ignore[misc]


def _new_layout(run: RunDirectory, iteration: int) -> Send | None:
    """The plan as a file, where its layouts are not those of the iteration before: reasons differ
    in every iteration, and a new layout is what people look for."""
    plan, before = _plan(run, iteration), _plan(run, iteration - 1)
    if all(plan.get(part) == before.get(part) for part in ("stages", "policy")):
        return None
    text = json.dumps(plan, indent=1)
    return lambda mlflow: mlflow.log_text(text, f"plans/{iteration:06d}.json")


def _plan(run: RunDirectory, iteration: int) -> dict[str, Any]:
    """The plan of an iteration; empty where there is none that can be read."""
    try:
        return dict(run.manifest(iteration, "select").outputs["plan"])
    except (ManifestError, KeyError):
        return {}


def _traces(run: RunDirectory, iteration: int) -> Send | None:
    path, most = run.episodes_path(iteration), run.config.tracking.trace_episodes
    try:
        episodes = read_episodes(path, most) if most else []
        seconds = path.stat().st_mtime if episodes else 0.0
    except (EpisodesDamaged, FileNotFoundError) as error:
        logger.warning("iteration %d is not traced: %s", iteration, error)
        return None
    traces = [episode_trace(run.uid, iteration, each, seconds) for each in episodes]

    def send(mlflow: MlflowRun) -> None:
        for trace in traces:
            mlflow.log_trace(trace)

    return send if traces else None


def _chart(rows: Sequence[Mapping[str, Any]]) -> Send | None:
    chart = selector_chart(rows)
    if chart is None:
        return None
    return lambda mlflow: mlflow.log_figure(chart, "charts/predicted_and_measured.svg")
