"""The worker groups that a profile measures with: those of one candidate at a time."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from earl_core.cluster.errors import WorkerLost
from earl_core.cluster.worker_group import WorkerGroup
from earl_core.config import RunConfig
from earl_core.config.stages import StagesConfig
from earl_core.control.failure_diagnosis import diagnose
from earl_core.control.worker_groups import WorkerGroups
from earl_core.deployment.shapes import Hardware
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.deployment.stages import STAGES
from earl_core.dispatch.segments.pool_directory import new_uid
from earl_core.run.record import write_record
from earl_core.selector.model.candidates import deployed
from earl_core.selector.profile_planner import (
    WINDOW_SECONDS,
    Point,
    generated_tokens,
    workers_of,
)
from earl_core.system.errors import Cancelled

_LEAST_DEADLINE_SECONDS = 60.0


class ProfileWorkers:
    """Starts, keeps and ends the groups; `close` it.

    length: tokens that engines are built for. They know no run: their logs, and whatever else they
    write, lie in a directory of their own. `stop` may be called from any thread.
    """

    def __init__(self, config: RunConfig, hardware: Hardware, length: int) -> None:
        self.start_seconds: dict[str, float] = {}
        self.running: StageDeployment | None = None
        self._hardware, self._length = hardware, length
        self._groups: list[WorkerGroup] = []
        self._deployment: StageDeployment | None = None
        self._directory = Path(tempfile.mkdtemp(prefix="earl-profile-"))
        write_record(self._directory, {"uid": new_uid()})
        path = str(Path(config.initial_model.path).resolve())
        self._weights = {"directory": path, "policy_version": 0}
        apart = config.dispatch.model_copy(update={"directory": str(self._directory / "shards")})
        self._config = config.model_copy(update={"dispatch": apart, "stages": StagesConfig()})
        self._made = WorkerGroups(self._config, self._directory, self._directory, hardware)

    def close(self, keep_logs: bool = False) -> None:
        """End the groups. keep_logs: a failure's message may name them."""
        self._made.close()
        if not keep_logs:
            shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def stopped(self) -> bool:
        """True when `stop` was called."""
        return self._made.stop_requested.is_set()

    def stop(self) -> None:
        """End all groups now; a call under way raises, and nothing starts any more."""
        self._made.interrupt()

    def end(self, grace_seconds: float = 10.0) -> None:
        """End the running groups; the next measurement starts others."""
        self.running = self._deployment = None
        self._made.stop_all(grace_seconds)

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Enclose work, and leave no group behind when it fails."""
        try:
            yield
        except BaseException as error:
            gone = isinstance(error, WorkerLost) and error.how == "lost"
            self.end(0.0 if gone else 10.0)
            if self.stopped:
                raise Cancelled("the profile was asked to stop") from error
            raise

    def build_model(self) -> None:
        """Make the initial model with `model.builder`. Raises what worker groups raise."""
        with self._ending():
            deployment = StageDeployment("model", threads=self._hardware.cpu_cores)
            self._made.call(deployment, "model", "build", 0)
        self.end()

    def measure(self, point: Point) -> dict[str, float]:
        """Measure a point with its candidate's workers, started if others run.

        `tokens_per_second` and `peak_bytes` as in `ProfilePoint`; of several engines the mean rate,
        of ranks the slowest; the largest peak of any. Raises what worker groups raise; the groups
        are then ended.
        """
        stage = point.candidate.stage
        arguments: dict[str, Any] = {"context": point.context}
        if stage == "rollout":
            arguments["weights"] = self._weights
            arguments["requests"] = point.requests
            arguments["generated"] = generated_tokens(point.context)
            arguments["seconds"] = WINDOW_SECONDS
        else:
            arguments["samples"] = point.requests
            arguments["scoring"] = STAGES[stage].scores
        with self._ending():
            self._prepare(point.candidate)
            deadline = max(_LEAST_DEADLINE_SECONDS, 20 * point.seconds)
            deadline = min(self._config.deadlines.stage, deadline)
            results = self._call("measure", stage, deadline, **arguments)
        rates = [result["tokens_per_second"] for result in results]
        peak = max(result["peak_bytes"] for result in results)
        if stage == "rollout":
            tensor = point.candidate.tensor_parallel
            return {"tokens_per_second": sum(rates) / len(rates), "peak_bytes": peak / tensor}
        return {"tokens_per_second": min(rates), "peak_bytes": peak}

    def _prepare(self, candidate: StageDeployment) -> None:
        """Have the candidate's workers running, with this very deployment."""
        stage, wanted = candidate.stage, self._deployment_of(candidate)
        # A learner measures what a reference would score.
        role = "rollout" if stage == "rollout" else "update"
        alive = self.running is not None and all(group.alive for group in self._groups)
        if not alive or workers_of(self.running or candidate) != workers_of(candidate):
            self.end()
            started = time.monotonic()
            get = partial(self._made.get, role, wanted)
            self._groups = _all([partial(get, member) for member in range(wanted.groups)])
            if stage == "rollout":
                self._call("ensure", stage, self._config.deadlines.start, weights=self._weights)
            self.start_seconds[stage] = time.monotonic() - started
        elif stage != "rollout" and wanted != self._deployment:
            self._made.reshard(role, wanted, 0)
        self.running, self._deployment = candidate, wanted

    def _deployment_of(self, candidate: StageDeployment) -> StageDeployment:
        wanted = deployed(candidate, self._hardware)
        if candidate.stage != "rollout":
            return wanted
        # Every load of the grid on the same engines; where each has a device of its own, one
        # engine shows what all of them do.
        return wanted._replace(
            replicas=1 if self._hardware.gpus else candidate.replicas,
            max_running_requests=self._config.rollout.max_running_requests,
            max_model_len=self._length,
        )

    def _call(self, method: str, stage: str, deadline: float, **arguments: Any) -> list[Any]:
        """Call all groups at the same time; the results of all their ranks."""
        calls = [
            partial(
                group.call, method, stage=stage, iteration=0, deadline_seconds=deadline, **arguments
            )
            for group in self._groups
        ]
        return [result for results in _all(calls) for result in results]


def _all(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run the calls side by side; their results, or the first one's error once all have ended.

    An error that says that memory ran out goes first, because the others may follow from it.
    """
    if len(calls) <= 1:
        return [call() for call in calls]
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise min(errors, key=lambda error: diagnose(error) is None)
    return [future.result() for future in futures]
