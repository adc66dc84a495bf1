"""What the run directory holds and MLflow lacks: the run directory is the tracker's queue.

Each thing has a key, its kind and its iteration. Things of a kind are sent in the order of their
iterations, so that the last one sent of each kind says all that MLflow has. MLflow itself holds
these numbers, in the tag `earl.sent`: a run that is new there, or its server, gets everything.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from earl_core.config import ConfigError, RunConfig, dump_config
from earl_core.config.environment import EnvironmentConfig
from earl_core.control.guard_decisions import found_in
from earl_core.dispatch import Manifest, ManifestError
from earl_core.run import RunDirectory
from earl_core.run.episodes import EpisodesDamaged
from earl_core.run.kept_episodes import read_episodes
from earl_core.secrets import shareable, shareable_values
from tasks.reports.chart import selector_chart
from tasks.reports.guard_report import newest_finding
from tasks.reports.lines import return_text
from tasks.reports.suite_table import suite_rows
from tasks.tracking.inputs import played_inputs
from tasks.tracking.metric_catalogue import described, for_mlflow
from tasks.tracking.mlflow_client import METRICS_PER_CALL, MlflowRun, Numbers
from tasks.tracking.registry import checkpoints_to_register, register
from tasks.tracking.system_metrics import system_samples
from tasks.tracking.traces import episode_trace

logger = logging.getLogger("earl.tracking")

SENT = "earl.sent"

_CHART_EVERY = 5
_EVALUATION_TABLE = "evaluation/results.json"
_NOT_METRICS = ("iteration", "time")

Send = Callable[[MlflowRun], None]


class Thing(NamedTuple):
    """Something of a kind, up to and with an iteration. send: None where there is none of it."""

    kind: str
    iteration: int
    send: Send | None


def sent_before(run: RunDirectory, tags: Mapping[str, str]) -> dict[str, int]:
    """The last iteration sent of each kind, by the tags of the MLflow run; empty where the run has
    gone back since: what it did again is of another past. A number that arrived keeps its time, and
    is the same to MLflow when it comes again."""
    found = json.loads(tags.get(SENT, "{}"))
    return found if found.pop("past", 0) == _past(run) else {}


def state_tags(run: RunDirectory, sent: Mapping[str, int]) -> dict[str, str]:
    """Return the tags of the run's present state: its plan's reasons, the guard's newest finding,
    its newest checkpoint, the things that were sent."""
    tags = {SENT: json.dumps({**sent, "past": _past(run)}, sort_keys=True)}
    reasons = _plan(run, sent.get("metrics", -1)).get("reasons", {})
    tags |= {f"plan.{stage}": shareable(str(reason)) for stage, reason in reasons.items()}
    for branch in run.branches.opened:
        tags["branch"] = str(branch.number)
        tags[f"branch.{branch.number}"] = shareable(branch.line)
    if found := newest_finding(found_in(run, sent.get("metrics", -1))):
        tags["guard"] = shareable(found)
    stable = run.last_stable()
    if stable >= 0:
        tags["checkpoint"] = str(run.checkpoint_path(stable).resolve())
        tags["checkpoint.iteration"] = str(stable)
    return tags


def unsent(run: RunDirectory, sent: Mapping[str, int]) -> Iterator[Thing]:
    """Yield the things to send, in order. sent: as of `sent_before`."""
    if sent.get("config.yaml", -1) < run.attempt:
        text = shareable(dump_config(run.config))
        yield Thing("config.yaml", run.attempt, lambda mlflow: mlflow.log_text(text, "config.yaml"))
    if "inputs" not in sent:
        yield Thing("inputs", 0, lambda mlflow: mlflow.log_inputs(played_inputs(run.config)))
    rows, evaluations = run.metrics(), run.evaluations()
    numbers = {
        "metrics": _iterations(run.config, rows),
        "evaluation": (_evaluation_numbers(run, found) for found in evaluations),
        "system": _system(run),
    }
    for kind, steps in numbers.items():
        yield from _batches(kind, [each for each in steps if each.step > sent.get(kind, -1)])
    finished = [int(row["iteration"]) for row in rows]
    for iteration in finished:
        if iteration > sent.get("plan", -1):
            yield Thing("plan", iteration, _new_layout(run, iteration))
    for row in rows:
        if (iteration := int(row["iteration"])) > sent.get("trace", -1):
            yield Thing("trace", iteration, _traces(run, iteration, row))
    if (last := max((each.iteration for each in evaluations), default=-1)) > sent.get(
        "results", -1
    ):
        table = _evaluation_rows(evaluations)
        yield Thing("results", last, lambda mlflow: mlflow.log_table(table, _EVALUATION_TABLE))
    for found in evaluations:
        if found.iteration > sent.get("child run", -1):
            yield Thing("child run", found.iteration, partial(_send_child_run, run, found))
    yield from _pages(run, rows, evaluations, sent)


def _pages(
    run: RunDirectory,
    rows: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Manifest],
    sent: Mapping[str, int],
) -> Iterator[Thing]:
    """Yield the things of the whole run: its chart, the meaning of its numbers, its checkpoints."""
    finished = [int(row["iteration"]) for row in rows]
    whole = run.config.iterations
    drawn = [k for k in finished if (k + 1) % _CHART_EVERY == 0 or k + 1 >= whole]
    if drawn and drawn[-1] > sent.get("chart", -1):
        yield Thing("chart", drawn[-1], _chart(rows))
    names = {name for row in rows for name in row if name not in _NOT_METRICS}
    names |= {f"evaluation/{name}" for found in evaluations for name in found.metrics}
    if len(names) > sent.get("metrics.json", 0):
        table = described(names)
        yield Thing("metrics.json", len(names), lambda to: to.log_table(table, "metrics.json"))
    # A checkpoint or an evaluation more may move an alias; both only grow.
    news = run.last_stable() + 1 + max((each.iteration for each in evaluations), default=0)
    if news > sent.get("checkpoints", 0):
        wanted = checkpoints_to_register(run)
        send = (lambda mlflow: register(mlflow, run, wanted)) if wanted else None
        yield Thing("checkpoints", news, send)


def _evaluation_numbers(run: RunDirectory, found: Manifest) -> Numbers:
    """The numbers of an evaluation for MLflow; its step is the number of finished iterations."""
    metrics = {f"evaluation/{name}": value for name, value in found.metrics.items()}
    seconds = run.stage_path(found.iteration, "evaluation").stat().st_mtime
    return Numbers(found.iteration, for_mlflow(metrics, scored=False), seconds)


def _evaluation_rows(evaluations: Sequence[Manifest]) -> list[dict[str, Any]]:
    """A line for the held-out episodes of each evaluation, and one for each suite in it."""
    rows = []
    for found in evaluations:
        metrics = found.metrics
        held_out: dict[str, Any] = {"iterations": found.iteration, "suite": "held-out"}
        for column, name in (("episodes", "episodes"), ("failed", "episodes_failed")):
            if name in metrics:
                held_out[column] = f"{metrics[name]:.0f}"
        if "return/mean" in metrics:
            held_out["return (95 %)"] = return_text(metrics)
        for name, part in found.outputs.get("outcomes", {}).items():
            held_out[f"{name} (95 %)"] = "{share:.0%} ({low:.0%}-{high:.0%})".format(**part)
        if len(held_out) > len(("iterations", "suite")):
            rows.append(held_out)
        for row in suite_rows(found.outputs.get("suites", {})):
            rows.append({"iterations": found.iteration, **row})
    return rows


def _send_child_run(run: RunDirectory, found: Manifest, mlflow: MlflowRun) -> None:
    """Make the child run of an evaluation."""
    count = found.iteration
    iterations = f"{count} iteration{'' if count == 1 else 's'}"
    child = mlflow.nested(f"{run.uid}/{count}", f"evaluation after {iterations}")
    parameters = {"evaluation.iterations": str(count), "run": run.config.name}
    child.describe(parameters, {"mlflow.source.name": "earl"})
    child.log_numbers([_evaluation_numbers(run, found)])
    if rows := _evaluation_rows([found]):
        child.log_table(rows, _EVALUATION_TABLE)
    child.end("FINISHED")


def _past(run: RunDirectory) -> int:
    """Count the times that the run went back to an earlier checkpoint."""
    return sum(1 for _ in (run.path / "set_aside").glob("[0-9]*"))


def _iterations(config: RunConfig, rows: Sequence[Mapping[str, Any]]) -> Iterator[Numbers]:
    reward = config.reward
    scored = bool(reward.functions) or reward.environment_weight != 1.0
    for row in rows:
        metrics = {name: row[name] for name in row if name not in _NOT_METRICS}
        yield Numbers(int(row["iteration"]), for_mlflow(metrics, scored=scored), float(row["time"]))


def _system(run: RunDirectory) -> Iterator[Numbers]:
    for step, sample in enumerate(system_samples(run.path)):
        metrics = {name: value for name, value in sample.items() if name != "time"}
        yield Numbers(step, metrics, sample["time"])


def _batches(kind: str, numbers: list[Numbers]) -> Iterator[Thing]:
    """Divide the steps into calls, each with as many as it may hold."""
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
    text = json.dumps(shareable_values(plan), indent=1)
    return lambda mlflow: mlflow.log_text(text, f"plans/{iteration:06d}.json")


def _plan(run: RunDirectory, iteration: int) -> dict[str, Any]:
    """The plan of an iteration; empty where there is none that can be read."""
    try:
        return dict(run.manifest(iteration, "select").outputs["plan"])
    except (ManifestError, KeyError):
        return {}


def _traces(run: RunDirectory, iteration: int, row: Mapping[str, Any]) -> Send | None:
    path, most = run.episodes_path(iteration), run.config.tracking.trace_episodes
    try:
        episodes = read_episodes(path, run.redaction, most) if most else []
        seconds = path.stat().st_mtime if episodes else 0.0
        run.redaction.check_something_left()
    except (EpisodesDamaged, FileNotFoundError, ConfigError) as error:
        logger.warning("iteration %d is not traced: %s", iteration, error)
        return None
    tools = _with_tools(run.config)
    names = {part: f"update/mismatch_{part}" for part in ("mean", "max", "kl")}
    mismatch = {part: row[name] for part, name in names.items() if name in row}
    traces = [
        episode_trace(
            run.uid, iteration, each, seconds, tools=each["environment"] in tools, mismatch=mismatch
        )
        for each in map(_numbered, range(len(episodes)), episodes)
    ]

    def send(mlflow: MlflowRun) -> None:
        for trace in traces:
            mlflow.log_trace(trace)

    return send if traces else None


def _numbered(place: int, episode: dict[str, Any]) -> dict[str, Any]:
    """An episode whose number was left out by rules, by its place: traces need to differ."""
    return {**episode, "episode_id": place} if episode["episode_id"] is None else episode


def _with_tools(config: RunConfig) -> set[str]:
    """Labels of the environments in which tools answer; a run's only one has none."""
    played: dict[str, EnvironmentConfig] = {each.title: each for each in config.environments}
    if config.environment is not None:
        played[""] = config.environment
    return {label for label, each in played.items() if each.tools or each.mcp}


def _chart(rows: Sequence[Mapping[str, Any]]) -> Send | None:
    chart = selector_chart(rows)
    if chart is None:
        return None
    return lambda mlflow: mlflow.log_text(chart, "charts/predicted_and_measured.svg")
