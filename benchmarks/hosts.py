"""The same run on one machine, on Ray with one host, and on Ray with two hosts and a slow link.

The hosts are namespaces of this machine, each with one of its cores (the single one with both) and
shared memory of its own. Two engines play and two ranks train in every run, so that the work is the
same; each rank holds half of the learner. Stages are split by the run's own records. Ray's share is
the time of all calls into Ray, counted in the controller (`benchmarks.hosts_controller`); bytes of
the update's reads are compared with the plan, which is made here again from the sealed manifests,
and the seconds of publishing with those that the half of the weights needs on the link.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from benchmarks.hosts_controller import NOTES
from earl_core.config import RunConfig
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.dispatch import Manifest
from earl_core.dispatch.reads.plan import DispatchPlan
from earl_core.dispatch.shards.manifest import read_manifest
from earl_core.learner.data.samples import TRAINED, RankReader, RowCost, by_minibatch
from earl_core.pretrained.model_directory import read_model_shape
from earl_core.run.record import read_lines, stored_config
from earl_core.run.worker import PlanReads
from earl_core.trajectory.schema import SAMPLE_BITS
from tools.harness import Report, Row, median, parser, publish
from tools.iterations import IterationTime, read_iterations
from tools.namespaces import TwoHosts
from tools.traffic import Traffic

_SETTINGS = {
    "evaluation.every": 0,
    "tracking.enabled": "false",
    "stages.rollout.replicas": 2,
    "stages.update.shard": 2,
    "rollout.threads": 1,
    "update.threads": 1,
}
_STAGES = ("rollout", "reward", "advantage", "update", "publish")
_TIMEOUT_SECONDS = 1800.0


@dataclass(frozen=True)
class Ran:
    """One run. opened_seconds: from the command to the first stage. ray_seconds, link_bytes: of the
    iterations after the first, together."""

    iterations: list[IterationTime]
    lines: list[dict[str, Any]]
    opened_seconds: float
    ray_seconds: float
    link_bytes: int
    directory: Path


def main() -> None:
    made = parser(__doc__ or "", overrides=True)
    made.add_argument("--config", default="tictactoe_tiny", help="a run file or recipe")
    made.add_argument("--iterations", type=int, default=8)
    made.add_argument("--megabits", type=float, default=1000.0, help="of the link, each way")
    options = made.parse_args()
    if options.quick:
        options.iterations = 3
    report = Report("hosts", "One run on one machine, and on hosts of a Ray cluster")
    with tempfile.TemporaryDirectory(prefix="earl-hosts-") as name:
        scratch = Path(name)
        with _cluster(scratch, 1, options.megabits) as (hosts, _):
            alone = _run(hosts, "machine", {}, options, scratch)
            one = _run(hosts, "one", _over(hosts, 1), options, scratch)
        with _cluster(scratch, 2, options.megabits) as (hosts, started):
            two = _run(hosts, "two", _over(hosts, 2), options, scratch)
        sides = {"one machine": alone, "Ray, one host": one, "Ray, two hosts": two}
        report.rows = [_row(side, ran) for side, ran in sides.items()]
        plan = [_planned(two.directory, each.number) for each in two.iterations]
        read = [float(line["update/remote_bytes"]) for line in two.lines[1:]]
        weights = median([float(line["publish/bytes"]) for line in two.lines[1:]])
    seconds = sum(each.wall for each in two.iterations)
    # Each of two hosts lacks half of the weights, and the link carries both ways at once.
    bound = weights / 2 / (options.megabits * 1e6 / 8)
    report.headline = {
        "ray_overhead_share": two.ray_seconds / seconds,
        "bytes_over_plan": sum(read) / max(1, sum(plan)),
        "weights_over_bound": median([each.stages["publish"] for each in two.iterations]) / bound,
        "two_raylets_start_seconds": started,
    }
    report.notes = [
        f"{options.config}, {len(two.iterations)} iterations after the first; the link lets "
        f"{options.megabits:g} Mbit/s through, each way. Medians.",
        "ray s: all calls into Ray of an iteration, in all threads of the controller, most of "
        "which nothing waits for.",
        "link KB: all that crosses the link in an iteration: rows, gradients (the two ranks of "
        "the update are on both hosts), Ray's messages.",
        f"bytes_over_plan: the update reads {sum(read):,.0f} bytes from the other host; its plans "
        f"say {sum(plan):,}.",
        f"weights_over_bound: half of the {weights / 1e6:,.1f} MB of weights take the link "
        f"{bound:.3g} s.",
    ]
    publish(report, options)


@contextmanager
def _cluster(scratch: Path, count: int, megabits: float) -> Any:
    """Hosts, and the seconds of their start."""
    logs = scratch / f"raylets{count}"
    logs.mkdir()
    hosts = TwoHosts(logs)
    try:
        hosts.link()
        hosts.shape(megabits)
        begun = time.monotonic()
        hosts.start(count)
        yield hosts, time.monotonic() - begun
    finally:
        hosts.stop()


def _over(hosts: TwoHosts, count: int) -> dict[str, Any]:
    return {
        "cluster.backend": "ray",
        "cluster.address": hosts.address,
        "cluster.hosts": count,
        "cluster.cpus_per_host": 1 if count == 2 else os.cpu_count(),
    }


def _run(hosts: TwoHosts, name: str, settings: dict[str, Any], options: Any, scratch: Path) -> Ran:
    """`earl train` on host-0."""
    given = {**_SETTINGS, "name": name, "runs_directory": scratch / "runs", **settings}
    given |= {"iterations": options.iterations + 1, "model.path": scratch / "model"}
    words = [*(f"{key}={value}" for key, value in given.items()), *options.set]
    command = [sys.executable, "-m", "benchmarks.hosts_controller", "train", options.config]
    command += ["--plain", *(word for each in words for word in ("--set", each))]
    notes, directory = scratch / f"{name}.calls", scratch / "runs" / name
    os.environ[NOTES] = str(notes)
    begun = time.time()
    process = hosts.popen(0, *command, directory=scratch)
    crossed = _follow(hosts, process, directory / "metrics.jsonl")
    if process.returncode:
        raise SystemExit(f"{name} failed:\n{process.stdout.read() if process.stdout else ''}")
    lines = read_lines(directory / "metrics.jsonl")
    since, until = lines[0]["time"], lines[-1]["time"]
    calls = [tuple(map(float, line.split())) for line in notes.read_text().splitlines()]
    return Ran(
        read_iterations(directory),
        lines,
        read_lines(directory / "ledger.jsonl")[0]["time"] - begun,
        sum(seconds for at, seconds in calls if since <= at <= until),
        crossed[-1] - crossed[0],
        directory,
    )


def _follow(hosts: TwoHosts, process: subprocess.Popen[str], metrics: Path) -> list[int]:
    """Note the bytes that had crossed the link when each iteration ended."""
    crossed: list[int] = []
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while process.poll() is None:
        done = metrics.read_text().count("\n") if metrics.is_file() else 0
        if done > len(crossed):
            crossed += [hosts.link_bytes()] * (done - len(crossed))
        if time.monotonic() > deadline:
            process.kill()
        time.sleep(0.02)
    return crossed or [0]


def _row(side: str, ran: Ran) -> Row:
    count = len(ran.iterations)
    found = {
        f"{stage} s": median([each.stages[stage] for each in ran.iterations]) for stage in _STAGES
    }
    return {
        "run": side,
        "s/iteration": median([each.wall for each in ran.iterations]),
        **found,
        "outside s": median([each.wall - each.inside for each in ran.iterations]),
        "to first stage s": ran.opened_seconds,
        "ray s": ran.ray_seconds / count,
        "link KB": ran.link_bytes / count / 1000,
    }


def _planned(directory: Path, iteration: int) -> int:
    """Bytes that the update's ranks have to read from the other host, by the plan alone."""
    config = stored_config(directory)
    folder = directory / "iterations" / f"{iteration:06d}"
    sealed = {
        stage: read_manifest(folder / f"{stage}.json")
        for stage in ("select", "rollout", "advantage")
    }
    deployment = StageDeployment(**sealed["select"].outputs["plan"]["stages"]["update"])
    plan = _plan(config, deployment, iteration, [sealed["rollout"], sealed["advantage"]])
    return Traffic(plan).moved_bytes


def _plan(
    config: RunConfig, deployment: StageDeployment, iteration: int, manifests: Sequence[Manifest]
) -> DispatchPlan:
    """Make the plan as every rank makes it; the groups are told instead of read."""
    hosts = tuple(sorted({entry.host for entry in manifests[0].shards}))
    rows = sorted(row for entry in manifests[-1].shards for row in entry.row_ids)
    groups = (np.array(rows, dtype=np.int64) >> SAMPLE_BITS) // config.rollout.group_size

    @contextmanager
    def told(*_: Any) -> Any:
        yield SimpleNamespace(scalars=lambda name: groups)

    reads = cast(PlanReads, SimpleNamespace(open=told))
    cost = RowCost.of(read_model_shape(Path(config.model.path)))
    of_rank = tuple(
        hosts[rank * len(hosts) // deployment.ranks] for rank in range(deployment.ranks)
    )
    mesh = cast(Any, SimpleNamespace(deployment=deployment, rank=0))
    split = by_minibatch(config.update.minibatches, seed=config.seed, iteration=iteration)
    return RankReader(reads, of_rank, cost).plan(manifests, mesh, TRAINED, split)


if __name__ == "__main__":
    main()
