"""A session: one live controller's hold on a run: its directory, worker groups and tracker.

Prefect tasks get small JSON references only; what lives across them (worker processes, the
tracker's queue) is looked up here by run directory. Groups outlive iterations and are rebuilt
when their StageDeployment changes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from earl_core.cluster.local import LocalWorkerGroup
from earl_core.config import ConfigError, RunConfig
from earl_core.dispatch import PoolFull
from earl_core.run import RunDirectory
from earl_core.run.shards import sweep_unneeded
from earl_core.selector import Hardware, ModelShape, StageDeployment, experience_deployment
from tasks.hardware import read_hardware, read_model_shape
from tasks.tracking import Status, Tracker

Progress = Callable[[str, int, dict[str, Any]], None]

TARGETS = {
    "rollout": "earl_core.rollout.worker:RolloutWorker",
    "experience": "earl_core.experience.worker:ExperienceWorker",
    "reference": "earl_core.learner.reference:ReferenceWorker",
    "update": "earl_core.learner.worker:LearnerWorker",
    "model": "earl_core.models.builder:ModelBuilder",
}
"""What runs in the ranks of each worker group."""


class SessionInterrupted(RuntimeError):
    """The controller was asked to stop."""


class StateLost(RuntimeError):
    """The live training state is not the one this iteration starts from."""


class Session:
    """Opened by `open_session`; close it to stop the workers and unlock the run."""

    def __init__(self, run: RunDirectory, listener: Progress | None = None) -> None:
        self.run = run
        self.config: RunConfig = run.config
        self.listener: Progress = listener or (lambda stage, iteration, progress: None)
        self.stop_requested = threading.Event()
        self._finished_here = -1
        self.single_iteration = False
        self._groups: dict[str, LocalWorkerGroup] = {}
        self._live_version: int | None = None
        self._lock = threading.RLock()
        self._starting = {role: threading.Lock() for role in TARGETS}
        self.hardware: Hardware = read_hardware()
        self._prepare_model()
        self.model: ModelShape = read_model_shape(Path(self.config.model.path))
        self._check_shared_memory()
        self._check_environment()
        self.tracker = Tracker(run, self.hardware)

    def _prepare_model(self) -> None:
        path = Path(self.config.model.path)
        if not (path / "config.json").is_file():
            self.listener("model", 0, {"building": str(path)})
            deployment = StageDeployment(stage="model", threads=self.hardware.cpu_cores)
            self.call(deployment, "model", "build", 0)
            self._groups.pop("model").stop()

    def _check_shared_memory(self) -> None:
        """Two versions of the weights lie in shared memory while one replaces the other."""
        files = Path(self.config.model.path).glob("*.safetensors")
        needed = 2 * sum(file.stat().st_size for file in files)
        try:
            self.run.store.reserve(needed)
        except PoolFull as error:
            raise ConfigError(f"two versions of the model's weights must fit: {error}") from error

    def _check_environment(self) -> None:
        deployment = experience_deployment(self.config.experience)
        self.call(deployment, "experience", "check", self.next_iteration())

    def next_iteration(self) -> int:
        """The iteration after the last one finished here, or covered by a checkpoint."""
        return max(self._finished_here, self.run.last_stable()) + 1

    def finish_iteration(self, iteration: int) -> None:
        """Remember that this session finished an iteration, with or without a checkpoint."""
        self._finished_here = iteration

    def group(self, role: str, deployment: StageDeployment) -> LocalWorkerGroup:
        """The role's live group under this deployment; started or rebuilt when needed."""
        with self._starting[role]:
            if self.stop_requested.is_set():
                raise SessionInterrupted("the run was asked to stop")
            with self._lock:
                group = self._groups.get(role)
                if group is None:
                    group = self._groups[role] = self._new_group(role, deployment)
            wanted = deployment.model_dump(mode="json")
            if not group.alive or group.deployment != wanted:
                self.listener(role, 0, {"starting": role})
                if role == "update":
                    self._live_version = None
                group.start(wanted, self._arguments(), deployment.world_size)
            return group

    @property
    def live_version(self) -> int | None:
        """Policy version that the live learner holds; None when there is none."""
        return self._live_version if self.live("update") is not None else None

    @live_version.setter
    def live_version(self, version: int) -> None:
        self._live_version = version

    def _new_group(self, role: str, deployment: StageDeployment) -> LocalWorkerGroup:
        threads = str(deployment.threads)
        return LocalWorkerGroup(
            role,
            TARGETS[role],
            log_directory=self.run.logs,
            environment={
                "OMP_NUM_THREADS": threads,
                # Threads that spin at a barrier for one that lost its core slow a busy machine
                # down tenfold; waiting costs a few microseconds.
                "OMP_WAIT_POLICY": "PASSIVE",
                "MKL_NUM_THREADS": threads,
                "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
                "TOKENIZERS_PARALLELISM": "false",
                # vLLM must be gone before the supervisor loses patience, or it leaves entries in
                # shared memory.
                "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
            },
            start_timeout_seconds=self.config.deadlines.start,
            heartbeat_timeout_seconds=self.config.deadlines.heartbeat,
        )

    def _arguments(self) -> dict[str, Any]:
        return {
            "config": self.config.model_dump(mode="json"),
            "run_directory": str(self.run.path),
        }

    def live(self, role: str) -> LocalWorkerGroup | None:
        """The role's group if it is alive."""
        group = self._groups.get(role)
        return group if group is not None and group.alive else None

    def call(
        self,
        deployment: StageDeployment,
        role: str,
        method: str,
        iteration: int,
        *,
        stage: str | None = None,
        **arguments: Any,
    ) -> dict[str, Any]:
        """Run a method in every rank of the role's group; rank 0's JSON result.

        For stages whose ranks return the same. Arguments as in `call_all`.
        """
        return self.call_all(deployment, role, method, iteration, stage=stage, **arguments)[0]

    def call_all(
        self,
        deployment: StageDeployment,
        role: str,
        method: str,
        iteration: int,
        *,
        stage: str | None = None,
        **arguments: Any,
    ) -> list[dict[str, Any]]:
        """Run a method in every rank of the role's group; all JSON results in rank order.

        `stage` names the stage in errors and progress when it is not the deployment's. Where each
        rank did a part, `earl_core.cluster.results.merge_results` makes them one.
        """
        group = self.group(role, deployment)
        name = stage or deployment.stage
        results: list[dict[str, Any]] = group.call(
            method,
            stage=name,
            iteration=iteration,
            deadline_seconds=self.config.deadlines.stage,
            on_progress=lambda progress: self.listener(name, iteration, progress),
            **arguments,
        )
        return results

    def peak_bytes(self, role: str) -> float:
        """Most private memory that the role's ranks used during their last call, together."""
        group = self._groups.get(role)
        return float(sum(use.tree_peak_bytes for use in group.memory)) if group else 0.0

    def interrupt(self) -> None:
        """Stop every worker group now, from any thread; calls under way raise."""
        self.stop_requested.set()
        self._stop_groups(grace_seconds=2.0)

    def _stop_groups(self, grace_seconds: float) -> None:
        with self._lock:
            groups = list(self._groups.values())
        if groups:
            with ThreadPoolExecutor(len(groups)) as pool:
                list(pool.map(lambda group: group.stop(grace_seconds), groups))

    def close(self, status: Status = "FINISHED") -> None:
        """Stop the workers, flush the tracker, unlock the run. Never raises for a tracker."""
        try:
            self._stop_groups(grace_seconds=10.0)
        finally:
            tracker = getattr(self, "tracker", None)
            if tracker is not None:
                tracker.close(status)
            self.run.close()


_sessions: dict[str, Session] = {}


def open_session(config: RunConfig, listener: Progress | None = None) -> Session:
    """Open the run of this configuration and register its session in this process."""
    run = RunDirectory.open(config)
    sweep_unneeded(Path(config.dispatch.directory), config.dispatch)
    session = Session.__new__(Session)
    try:
        session.__init__(run, listener)  # type: ignore[misc]
    except BaseException:
        session.close()
        raise
    _sessions[_name(run.path)] = session
    return session


def close_session(session: Session, failed: bool = False) -> None:
    """Close and forget a session; the tracker is told how it ended."""
    _sessions.pop(_name(session.run.path), None)
    interrupted = session.stop_requested.is_set()
    session.close("KILLED" if interrupted else "FAILED" if failed else "FINISHED")


def find_session(run_directory: str | Path) -> Session | None:
    """This process's open session on the run, if any."""
    return _sessions.get(_name(run_directory))


def open_sessions() -> list[Session]:
    """Every open session of this process, for whoever handles a signal."""
    return list(_sessions.values())


def get_session(run_directory: str | Path) -> Session:
    """This process's open session on the run."""
    session = find_session(run_directory)
    if session is None:
        raise RuntimeError(
            f"no session on {run_directory} is open in this process: stages run inside the "
            "`iteration` or `train` flow, not by themselves"
        )
    return session


def _name(path: str | Path) -> str:
    return str(Path(path).resolve())
