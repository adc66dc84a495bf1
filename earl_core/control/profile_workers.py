"""The worker groups that a profile measures with: those of one layout at a time."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from earl_core.cluster.errors import WorkerLost
from earl_core.cluster.local import LocalWorkerGroup
from earl_core.cluster.placement import PLACEMENTS, Assignment, HostResources, ResourceRequest
from earl_core.config import RunConfig
from earl_core.control.failure_diagnosis import diagnose
from earl_core.control.worker_environment import worker_environment
from earl_core.dispatch.segments.names import new_uid
from earl_core.run.record import write_record
from earl_core.selector import Hardware, StageDeployment
from earl_core.selector.model.candidates import Candidate
from earl_core.selector.profile_planner import (
    WINDOW_SECONDS,
    Point,
    generated_tokens,
    workers_of,
)
from earl_core.system.errors import Cancelled

_IN_ITS_PLACE = "earl_core.cluster.placement:build"
_TARGETS = {
    "model": "earl_core.models.builder:ModelBuilder",
    "rollout": "earl_core.rollout.rollout_worker:RolloutWorker",
    "reference": "earl_core.learner.update_worker:LearnerWorker",
    "update": "earl_core.learner.update_worker:LearnerWorker",
}
_GRACE_SECONDS = 30.0
_LEAST_DEADLINE_SECONDS = 60.0


class ProfileWorkers:
    """Starts, keeps and ends the groups; `close` it.

    length: tokens that engines are built for. They know no run: their logs, and whatever else they
    write, lie in a directory of their own. `stop` may be called from any thread.
    """

    def __init__(self, config: RunConfig, hardware: Hardware, length: int) -> None:
        self.start_seconds: dict[str, float] = {}
        self.running: Candidate | None = None
        self._hardware, self._length = hardware, length
        self._groups: list[LocalWorkerGroup] = []
        self._deployment: StageDeployment | None = None
        self._stopped = threading.Event()
        self._lock = threading.RLock()
        self._directory = Path(tempfile.mkdtemp(prefix="earl-profile-"))
        write_record(self._directory, {"uid": new_uid()})
        apart = config.dispatch.model_copy(update={"directory": str(self._directory / "shards")})
        self._config = config.model_copy(update={"dispatch": apart})

    def close(self, keep_logs: bool = False) -> None:
        """End the groups. keep_logs: a failure's message may name them."""
        self.end(_GRACE_SECONDS)
        if not keep_logs:
            shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped.is_set()

    def stop(self) -> None:
        """End all groups now; a call under way raises, and nothing starts any more."""
        self._stopped.set()
        with self._lock:
            groups = list(self._groups)
        _all([partial(group.stop, 2.0) for group in groups])

    def end(self, grace_seconds: float = 10.0) -> None:
        """End the running groups; the next measurement starts others."""
        with self._lock:
            groups, self._groups = self._groups, []
            self.running = self._deployment = None
        _all([partial(group.stop, grace_seconds) for group in groups])

    def build_model(self) -> None:
        """Make the initial model with `model.builder`. Raises what worker groups raise."""
        deployment = StageDeployment(stage="model", threads=self._hardware.cpu_cores)
        self._start("model", deployment, [Assignment()])
        self._call("build", "model", self._config.deadlines.stage)
        self.end()

    def measure(self, point: Point) -> dict[str, float]:
        """Measure a point with its layout's workers, started if others run.

        `tokens_per_second` and `peak_bytes` as in `ProfilePoint`; of several engines the mean rate,
        of ranks the slowest; the largest peak of any. Raises what worker groups raise; the groups
        are then ended.
        """
        try:
            self._prepare(point.candidate)
            deadline = max(_LEAST_DEADLINE_SECONDS, 20 * point.seconds)
            deadline = min(self._config.deadlines.stage, deadline)
            layout = point.candidate
            arguments: dict[str, Any] = {"context": point.context}
            if layout.stage == "rollout":
                arguments["requests"] = point.requests
                arguments["generated"] = generated_tokens(point.context)
                arguments["seconds"] = WINDOW_SECONDS
            else:
                arguments["samples"] = point.requests
                arguments["scoring"] = layout.stage == "reference"
            results = self._call("measure", layout.stage, deadline, **arguments)
        except BaseException as error:
            gone = isinstance(error, WorkerLost) and error.how == "lost"
            self.end(0.0 if gone else 10.0)
            if self.stopped:
                raise Cancelled("the profile was asked to stop") from error
            raise
        rates = [result["tokens_per_second"] for result in results]
        peak = max(result["peak_bytes"] for result in results)
        if layout.stage == "rollout":
            return {
                "tokens_per_second": sum(rates) / len(rates),
                "peak_bytes": peak / layout.tensor,
            }
        return {"tokens_per_second": min(rates), "peak_bytes": peak}

    def _prepare(self, layout: Candidate) -> None:
        """Have the layout's workers running, with this very deployment."""
        wanted = self._deployment_of(layout)
        alive = bool(self._groups) and all(group.alive for group in self._groups)
        if not alive or self.running is None or workers_of(self.running) != workers_of(layout):
            self.end()
            started = time.monotonic()
            if layout.stage == "rollout":
                self._start_engines(layout, wanted)
            else:
                self._start(layout.stage, wanted, self._places(layout, wanted))
            self.start_seconds[layout.stage] = time.monotonic() - started
        elif layout.stage != "rollout" and wanted != self._deployment:
            self._groups[0].relayout(
                wanted.model_dump(mode="json"),
                stage=layout.stage,
                iteration=0,
                deadline_seconds=self._config.deadlines.stage,
            )
        self.running, self._deployment = layout, wanted

    def _deployment_of(self, layout: Candidate) -> StageDeployment:
        hardware = self._hardware
        if hardware.gpus:
            share = hardware.cpu_cores // hardware.devices_per_host
            layout = layout._replace(threads=max(1, share))
        if layout.stage != "rollout":
            return layout.deployment()
        # Every load of the grid on the same engines; where each has a device of its own, one
        # engine shows what all of them do.
        limit = self._config.rollout.max_running_requests
        replicas = 1 if hardware.gpus else layout.replicas
        return layout._replace(running=limit, replicas=replicas).deployment(self._length)

    def _places(self, layout: Candidate, wanted: StageDeployment) -> list[Assignment]:
        """Where each group of the layout runs: one for each engine, or one for all ranks."""
        site = HostResources(tuple(sorted(os.sched_getaffinity(0))), self._hardware.gpus)
        rollout = layout.stage == "rollout"
        ranks = layout.tensor if rollout else wanted.world_size
        members = wanted.replicas if rollout else 1
        wishes = [
            ResourceRequest(layout.stage, ranks, wanted.threads, m, members) for m in range(members)
        ]
        return [PLACEMENTS["colocated"].place(wish, site) for wish in wishes]

    def _start_engines(self, layout: Candidate, wanted: StageDeployment) -> None:
        places = self._places(layout, wanted)
        self._start("rollout", wanted.model_copy(update={"replicas": 1}), places)
        path = str(Path(self._config.model.path).resolve())
        self._call(
            "ensure_directory", "rollout", self._config.deadlines.start,
            path=path, policy_version=0,
        )  # fmt: skip

    def _start(self, stage: str, deployment: StageDeployment, places: list[Assignment]) -> None:
        """Start a group in each of the places."""
        groups = [self._group(f"{stage}-{number}", deployment) for number in range(len(places))]
        with self._lock:
            if self.stopped:
                raise Cancelled("the profile was asked to stop")
            self._groups = groups
        calls = []
        for group, place in zip(groups, places, strict=True):
            arguments = {
                "target": _TARGETS[stage],
                "cores": list(place.cores),
                "gpus": list(place.gpus),
                "arguments": {
                    "config": self._config.model_dump(mode="json"),
                    "run_directory": str(self._directory),
                },
            }
            dumped = deployment.model_dump(mode="json")
            calls.append(partial(group.start, dumped, arguments, deployment.world_size))
        _all(calls)

    def _call(self, method: str, stage: str, deadline: float, **arguments: Any) -> list[Any]:
        """Call all groups at the same time; the results of all their ranks."""
        calls = [
            partial(
                group.call, method, stage=stage, iteration=0, deadline_seconds=deadline, **arguments
            )
            for group in self._groups
        ]
        return [result for results in _all(calls) for result in results]

    def _group(self, role: str, deployment: StageDeployment) -> LocalWorkerGroup:
        return LocalWorkerGroup(
            role,
            _IN_ITS_PLACE,
            log_directory=self._directory,
            environment=worker_environment(deployment.threads),
            start_timeout_seconds=self._config.deadlines.start,
            heartbeat_timeout_seconds=self._config.deadlines.heartbeat,
        )


def _all(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run the calls side by side; their results, or the first one's error once all have ended.

    An error that says that memory ran out goes first, for the others may follow from it.
    """
    if len(calls) <= 1:
        return [call() for call in calls]
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise min(errors, key=lambda error: diagnose(error) is None)
    return [future.result() for future in futures]
