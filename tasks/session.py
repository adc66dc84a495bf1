"""A session: one live controller's hold on a run: its directory, worker groups and tracker.

Prefect tasks get small JSON references only; what lives across them (worker processes, the
tracker's queue) is looked up here by run directory. Groups outlive iterations and are rebuilt
when their StageDeployment changes. A role has one group, but the rollout one for each engine, so
that an engine that is lost takes no other with it.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from earl_core.cluster.local import LocalWorkerGroup
from earl_core.cluster.placement import PLACED, Place, Site, Wish
from earl_core.config import ConfigError, RunConfig, check_references
from earl_core.config.layout import check_devices, check_layout
from earl_core.dispatch import PoolFull
from earl_core.run import RunDirectory
from earl_core.run.shards import sweep_unneeded
from earl_core.selector import Hardware, ModelShape, StageDeployment, experience_deployment
from tasks.hardware import read_hardware, read_model_shape
from tasks.observed import LearntProfile, Observed
from tasks.tracking import Status, Tracker
from tasks.worker_environment import worker_environment

Progress = Callable[[str, int, dict[str, Any]], None]

TARGETS = {
    "rollout": "earl_core.rollout.worker:RolloutWorker",
    "experience": "earl_core.experience.worker:ExperienceWorker",
    "reference": "earl_core.learner.reference:ReferenceWorker",
    "update": "earl_core.learner.worker:LearnerWorker",
    "model": "earl_core.models.builder:ModelBuilder",
}
"""What runs in the ranks of each worker group."""

_IN_ITS_PLACE = "earl_core.cluster.placement:build"

_MEMORY = {
    "rollout": ("release_memory", "restore_memory"),
    "reference": ("offload", "reload"),
    "update": ("offload", "reload"),
}
"""How a role's workers give their device's memory back, and take it again."""

_GRACE_SECONDS = 30.0
"""For a clean end: vLLM takes up to 20 s on a busy machine, and leaves entries in shared memory
when it is cut short."""

Member = tuple[str, int]
"""A worker group: the role, and which of its groups, counted from 0."""


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
        self.losses: Counter[int] = Counter()
        self.single_iteration = False
        self.observed = Observed(run)
        self.profile: LearntProfile | None = None
        self._groups: dict[Member, LocalWorkerGroup] = {}
        self._places: dict[Member, Place] = {}
        self._released: set[Member] = set()
        self._live_version: int | None = None
        self._lock = threading.RLock()
        self._starting: defaultdict[Member, threading.RLock] = defaultdict(threading.RLock)
        # From here on this process hides what they lead to.
        check_references(self.config)
        self.hardware: Hardware = read_hardware()
        check_devices(self.config, self.hardware)
        self._prepare_model()
        self.model: ModelShape = read_model_shape(Path(self.config.model.path))
        check_layout(self.config, self.model, self.hardware)
        self._check_shared_memory()
        self._check_environment()
        run.store_config()
        self.tracker = Tracker(run, self.hardware)

    def _prepare_model(self) -> None:
        path = Path(self.config.model.path)
        if not (path / "config.json").is_file():
            self.listener("model", 0, {"building": str(path)})
            deployment = StageDeployment(stage="model", threads=self.hardware.cpu_cores)
            self.call(deployment, "model", "build", 0)
            self._groups.pop(("model", 0)).stop()

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

    def go_back(self) -> None:
        """Forget what this session finished after the last checkpoint: it is done again."""
        self._finished_here = -1

    def group(self, role: str, deployment: StageDeployment, member: int = 0) -> LocalWorkerGroup:
        """The role's live group under this deployment; started or rebuilt when needed.

        member: which engine's, for the rollout.
        """
        key = (role, member)
        with self._lock:
            starting = self._starting[key]
        with starting:
            if self.stop_requested.is_set():
                raise SessionInterrupted("the run was asked to stop")
            self._make_room(role, deployment)
            place = self._place(role, deployment, member)
            if role == "rollout":
                # An engine does not change when others come and go.
                deployment = deployment.model_copy(update={"replicas": 1})
            group = self.live(role, member)
            wanted = deployment.model_dump(mode="json")
            if group is None or group.deployment != wanted or self._places.get(key) != place:
                group = self._rebuild(key, deployment, place)
            elif key in self._released:
                self._memory_call(key, _MEMORY[role][1], deployment)
                self._released.discard(key)
            return group

    def _rebuild(self, key: Member, deployment: StageDeployment, place: Place) -> LocalWorkerGroup:
        role, member = key
        name = f"{role}-{member}" if role == "rollout" else role
        self.listener(role, 0, {"starting": name if member else role})
        if role == "update":
            self._live_version = None
        with self._lock:
            old = self._groups.get(key)
        if old is not None:
            old.stop(_GRACE_SECONDS)
        group = self._new_group(name, deployment)
        with self._lock:
            if self.stop_requested.is_set():
                raise SessionInterrupted("the run was asked to stop")
            self._groups[key], self._places[key] = group, place
            self._released.discard(key)
        arguments = {
            "target": TARGETS[role],
            "cores": list(place.cores),
            "gpus": list(place.gpus),
            "arguments": self._arguments(),
        }
        group.start(deployment.model_dump(mode="json"), arguments, deployment.world_size)
        return group

    def _place(self, role: str, deployment: StageDeployment, member: int) -> Place:
        if role not in PLACED:
            return Place()
        rollout = role == "rollout"
        wish = Wish(
            role=role,
            ranks=deployment.tensor_parallel if rollout else deployment.world_size,
            threads=deployment.threads,
            member=member,
            members=deployment.replicas if rollout else 1,
        )
        cores = tuple(sorted(os.sched_getaffinity(0)))
        return self.config.layout.placed.place(wish, Site(cores, self.hardware.gpus))

    def _make_room(self, role: str, deployment: StageDeployment) -> None:
        """Have other roles give back the devices' memory that this one is about to use."""
        if not self.hardware.gpus or role not in PLACED:
            # A core's memory is everybody's: nothing would be freed by giving it back.
            return
        for key in list(self._groups):
            giving = key[0] in self.config.layout.placed.gives_way(role)
            if giving and key not in self._released and self.live(*key) is not None:
                self._memory_call(key, _MEMORY[key[0]][0], deployment)
                self._released.add(key)

    def _memory_call(self, key: Member, method: str, deployment: StageDeployment) -> None:
        self._groups[key].call(
            method,
            stage=deployment.stage,
            iteration=self.next_iteration(),
            deadline_seconds=self.config.deadlines.stage,
        )

    def relayout(self, role: str, deployment: StageDeployment, iteration: int) -> dict[str, Any]:
        """Lay the role's live ranks out anew, their number and their state unchanged.

        What rank 0 says of it: seconds and bytes. `live_version` stays. Raises what
        `WorkerGroup.relayout` raises; the group has then ended.
        """
        with self._starting[(role, 0)]:
            self._make_room(role, deployment)
            group = self._groups[(role, 0)]
            self.listener(role, iteration, {"laying_out": role})
            results = group.relayout(
                deployment.model_dump(mode="json"),
                stage=role,
                iteration=iteration,
                deadline_seconds=self.config.deadlines.stage,
            )
            # What it had parked, it took back to move it.
            self._released.discard((role, 0))
            return dict(results[0] or {})

    def retire(self, role: str, members: int) -> None:
        """Stop the role's groups from number `members` on, which no layout has any more."""
        with self._lock:
            over = [key for key in self._groups if key[0] == role and key[1] >= members]
            groups = [self._groups.pop(key) for key in over]
        for group in groups:
            group.stop(_GRACE_SECONDS)

    @property
    def live_version(self) -> int | None:
        """Policy version that the live learner holds; None when there is none."""
        return self._live_version if self.live("update") is not None else None

    @live_version.setter
    def live_version(self, version: int) -> None:
        self._live_version = version

    def _new_group(self, name: str, deployment: StageDeployment) -> LocalWorkerGroup:
        return LocalWorkerGroup(
            name,
            _IN_ITS_PLACE,
            log_directory=self.run.logs,
            environment=worker_environment(deployment.threads),
            start_timeout_seconds=self.config.deadlines.start,
            heartbeat_timeout_seconds=self.config.deadlines.heartbeat,
        )

    def _arguments(self) -> dict[str, Any]:
        return {
            "config": self.config.model_dump(mode="json"),
            "run_directory": str(self.run.path),
        }

    def live(self, role: str, member: int = 0) -> LocalWorkerGroup | None:
        """The role's group if it is alive."""
        group = self._groups.get((role, member))
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
        return float(sum(use.tree_peak_bytes for g in self._of(role) for use in g.memory))

    def bytes_now(self, role: str) -> float:
        """Private memory that the role's live ranks use now, together."""
        living = [group for group in self._of(role) if group.alive]
        return float(sum(use.tree_bytes for group in living for use in group.memory))

    def _of(self, role: str) -> list[LocalWorkerGroup]:
        with self._lock:
            return [group for key, group in self._groups.items() if key[0] == role]

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
            self._stop_groups(_GRACE_SECONDS)
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
