"""A run's worker groups: started when a stage needs them or ahead of that, rebuilt, and stopped.

Groups outlive iterations and are rebuilt when their StageDeployment changes. A role has one group,
but the rollout one for each engine, so that an engine that is lost takes no other with it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from earl_core.cluster.errors import WorkerError
from earl_core.cluster.group import Group
from earl_core.cluster.host import Host, LocalHost, local_hosts
from earl_core.cluster.in_process import InProcessGroup
from earl_core.cluster.worker_group import WorkerGroup
from earl_core.config import RunConfig
from earl_core.control.worker_environment import worker_environment
from earl_core.deployment.placement import Division, Place, spread
from earl_core.deployment.shapes import Hardware
from earl_core.deployment.stage_deployment import StageDeployment, move_between
from earl_core.deployment.stages import PLACED, ROLES
from earl_core.run.branches import Branches
from earl_core.run.worker import Peers
from earl_core.system.errors import Cancelled

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, dict[str, Any]], None]
"""Told of a stage, its iteration, and what is new of it."""


def quiet(stage: str, iteration: int, progress: dict[str, Any]) -> None:
    """A listener for whom nobody listens."""


TARGETS = {role.name: role.target for role in ROLES.values()}
"""Import path of the object that runs in the ranks of each worker group."""


def preload_ranks(hosts: Sequence[Host] = ()) -> None:
    """Have the imports of all ranks done beside something else; returns at once.

    hosts: where; none: on this machine.
    """
    modules = [target.partition(":")[0] for target in TARGETS.values()]
    for host in hosts or [LocalHost()]:
        host.preload(modules)


_IN_ITS_PLACE = "earl_core.cluster.placed_rank:build"

_GRACE_SECONDS = 30.0
"""Seconds for a clean end: vLLM takes up to 20 s on a busy machine, and leaves entries in shared
memory when it is cut short."""

_PARKING_SECONDS = 6.0
"""For engines of a stream after Ctrl-C, of the 9 s that a command has to end."""

Member = tuple[str, int]
"""A worker group: the role, and which of its groups, counted from 0."""


class Ahead(NamedTuple):
    """Start and end of a start ahead of need, by `time.perf_counter`."""

    begun: float
    done: float

    def seconds(self, waited_since: float) -> float:
        """Return the seconds of the start and of the work that followed until now, for a caller
        that waits since `waited_since`."""
        return self.done - self.begun + time.perf_counter() - max(waited_since, self.done)


class WorkerGroups:
    """The groups of one controller. Any thread may ask for one; no two start the same one.

    directory: the run's. listener: told what starts. next_iteration: the one that calls outside of
    a stage belong to. hosts: where ranks run; none: this machine. peers: for who reads shards.
    here: have all in this process and the callers' threads, for a debugger. note: keeps an event of
    an iteration and a stage. branches: the run's. `rebuilt`: groups that were lost between two
    calls, by iteration. `division`: of the devices, by which groups have their places.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: Path,
        logs: Path,
        hardware: Hardware,
        listener: Progress = quiet,
        next_iteration: Callable[[], int] = lambda: 0,
        hosts: Sequence[Host] = (),
        peers: Peers = Peers(),  # noqa: B008  (it cannot change)
        here: bool = False,
        note: Callable[[int, str, str], None] = lambda iteration, stage, event: None,
        branches: Branches = Branches(),  # noqa: B008  (it cannot change)
    ) -> None:
        self.hardware, self._note = hardware, note
        self.rebuilt: Counter[int] = Counter()
        self.stop_requested = threading.Event()
        self._config, self._directory, self._logs = config, directory, logs
        self.division, self._settings = config.stages.division, config.model_dump(mode="json")
        self._listener = listener
        self._next_iteration = next_iteration
        self._hosts = hosts or local_hosts(1)
        self._of_run, self._here = {"peers": list(peers), "branches": branches.dump()}, here
        self._closing = False
        self._groups: dict[Member, Group] = {}
        self._places: dict[Member, tuple[Place, ...]] = {}
        self._released: set[Member] = set()
        self._lock = threading.RLock()
        self._starting: defaultdict[Member, threading.RLock] = defaultdict(threading.RLock)
        self._turns = threading.BoundedSemaphore(max(1, hardware.cpu_cores // 2))
        self._threads: list[threading.Thread] = []
        self._ahead: dict[Member, Ahead] = {}

    def get(
        self, role: str, deployment: StageDeployment, member: int = 0, kept: bool = False
    ) -> Group:
        """The role's live group under this deployment; started or rebuilt when needed.

        member: which engine's, for the rollout. kept: its state is needed, so one that was lost is
        returned as it is, and its call raises how.
        """
        key = (role, member)
        with self._starting_of(key):
            self._refuse_when_stopping()
            if kept and key in self._groups and not self._groups[key].alive:
                return self._groups[key]
            self._make_room(role, deployment)
            places = self._place(deployment, member)
            if role == "rollout":
                # An engine does not change when others come and go.
                deployment = deployment._replace(replicas=1)
            group = self.live(role, member)
            live = StageDeployment(**group.deployment) if group and group.deployment else None
            # A reshard is for the stage to ask for: it knows what becomes of the state.
            own = live is not None and move_between(live, deployment) in ("none", "settings")
            if group is None or not own or self._places.get(key) != places:
                return self._rebuild(key, deployment, places)
            if key in self._released:
                self._call_quietly(group, ROLES[role].restore, deployment)
                self._released.discard(key)
            if live != deployment:
                self.reshard(role, deployment, self._next_iteration(), member)
            return group

    def _rebuild(
        self, key: Member, deployment: StageDeployment, places: tuple[Place, ...]
    ) -> Group:
        role, member = key
        name = f"{role}-{member}" if role == "rollout" else role
        self._listener(role, 0, {"starting": name if member else role})
        with self._lock:
            old = self._groups.get(key)
        if old is not None:
            self._count_loss(role, name, old.silent_loss)
            old.stop(_GRACE_SECONDS)
        make: Callable[..., Group] = InProcessGroup if self._here else WorkerGroup
        group = make(
            name,
            _IN_ITS_PLACE,
            log_directory=self._logs,
            environment=worker_environment(role, deployment.threads, self.hardware),
            start_timeout_seconds=self._config.deadlines.start,
            heartbeat_timeout_seconds=self._config.deadlines.heartbeat,
        )
        with self._lock:
            self._refuse_when_stopping()
            self._groups[key], self._places[key] = group, places
            self._released.discard(key)
            self._ahead.pop(key, None)
        arguments = {
            "target": TARGETS[role],
            "assignments": [asdict(assignment) for _, assignment in places],
            "gpus_of_host": self.hardware.gpus // self.hardware.hosts,
            "arguments": {
                "config": self._settings,
                "run_directory": str(self._directory),
                **self._of_run,
            },
        }
        hosts = [self._hosts[number] for number, _ in places]
        group.start(deployment._asdict(), arguments, len(hosts), hosts)
        return group

    def _count_loss(self, role: str, name: str, reason: str) -> None:
        """Count a group that was lost between two calls; a loss that a call raises is counted by
        its stage."""
        if reason:
            iteration = self._next_iteration()
            self.rebuilt[iteration] += 1
            text = f"worker group '{name}' was lost ({reason}) and is built again"
            logger.warning("%s", text)
            self._note(iteration, role, text)

    def _starting_of(self, key: Member) -> threading.RLock:
        with self._lock:
            return self._starting[key]

    def _refuse_when_stopping(self) -> None:
        if self._closing or self.stop_requested.is_set():
            raise Cancelled("the run was asked to stop")

    def _place(self, deployment: StageDeployment, member: int) -> tuple[Place, ...]:
        resources = [host.resources for host in self._hosts]
        return spread(self.division.placed, deployment, member, resources)

    def _make_room(self, role: str, deployment: StageDeployment) -> None:
        """Have other roles give back the devices' memory that this one is about to use."""
        if not self.hardware.gpus or role not in PLACED:
            # A core's memory is everybody's. What of it can be given back is asked for by the stage
            # that needs it: here groups that play may be asked, because others start beside them.
            return
        self.make_room(role, deployment)

    def make_room(self, role: str, deployment: StageDeployment) -> None:
        """Have the roles that take turns with this one give back what memory they can, until they
        are asked for again. None of them may be in a call."""
        for key in list(self._groups):
            giving = key[0] in self.division.placed.gives_way(role)
            if giving and key not in self._released and self.live(*key) is not None:
                self._call_quietly(self._groups[key], ROLES[key[0]].release, deployment)
                self._released.add(key)

    def _call_quietly(self, group: Group, method: str, deployment: StageDeployment) -> None:
        group.call(
            method,
            stage=deployment.stage,
            iteration=self._next_iteration(),
            deadline_seconds=self._config.deadlines.stage,
        )

    def reshard(
        self, role: str, deployment: StageDeployment, iteration: int, member: int = 0
    ) -> dict[str, Any]:
        """Reshard a live group of the role, the number of its ranks and their state unchanged.

        Returns rank 0's report. Raises what `Group.reshard` raises; the group has then ended."""
        with self._starting_of((role, member)):
            self._make_room(role, deployment)
            group = self._groups[(role, member)]
            self._listener(role, iteration, {"resharding": role})
            results = group.reshard(
                deployment._asdict(),
                stage=role,
                iteration=iteration,
                deadline_seconds=self._config.deadlines.stage,
            )
            # What it had parked, it took back to move it.
            self._released.discard((role, member))
            return dict(results[0] or {})

    def retire(self, role: str, members: int) -> None:
        """Stop the role's groups from number `members` on, which no plan has any more."""
        with self._lock:
            over = [key for key in self._groups if key[0] == role and key[1] >= members]
            groups = [self._groups.pop(key) for key in over]
        for group in groups:
            group.stop(_GRACE_SECONDS)

    def move(self, division: Division) -> None:
        """Have groups be placed by another division of the devices: those that have a place end.
        None of them may be in a call."""
        for thread in self._threads:
            thread.join(self._config.deadlines.start)
        for role in PLACED:
            self.retire(role, 0)
        self.division = division

    def start_ahead(self, wanted: Iterable[tuple[str, StageDeployment]]) -> None:
        """Start the groups of these roles side by side, and return at once.

        A stage that needs one of them waits for it. Groups that live are left alone, for only their
        stage knows how to bring their state into another one, and so are those that must not use a
        device beside others. Half of the cores start groups ahead, because a stage may start one of
        its own meanwhile. An error is the stage's to raise: it starts the group again. A group in
        this process is its caller's to start.
        """
        if self._here:
            return
        for role, deployment in wanted:
            if self.hardware.gpus and self.division.placed.gives_way(role):
                continue
            for member in range(deployment.groups):
                if self.live(role, member) is None:
                    self._in_background(role, deployment, member)

    def _in_background(self, role: str, deployment: StageDeployment, member: int) -> None:
        def work() -> None:
            try:
                with self._turns, self._starting_of((role, member)):
                    if self.live(role, member) is None:
                        self._start_ahead(role, deployment, member)
            except (WorkerError, Cancelled, OSError) as error:
                logger.info("%s could not be started ahead: %s", role, error)

        thread = threading.Thread(target=work, name=f"earl-ahead-{role}-{member}", daemon=True)
        with self._lock:
            thread.start()
            self._threads = [each for each in self._threads if each.is_alive()] + [thread]

    def _start_ahead(self, role: str, deployment: StageDeployment, member: int) -> None:
        begun = time.perf_counter()
        group = self.get(role, deployment, member)
        if prepare := ROLES[role].prepare:
            self._call_quietly(group, prepare, deployment)
        self._ahead[(role, member)] = Ahead(begun, time.perf_counter())

    def started_ahead(self, role: str, member: int = 0) -> Ahead | None:
        """Return the times of the group's start, if that was ahead of need and nobody has asked
        yet."""
        return self._ahead.pop((role, member), None)

    def live(self, role: str, member: int = 0) -> Group | None:
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
        kept: bool = False,
        **arguments: Any,
    ) -> list[dict[str, Any]]:
        """Run a method in every rank of the role's group; all JSON results in rank order.

        `kept`: see `get`. `stage` names the stage in errors and progress when it is not the
        deployment's. Where each rank did a part, `earl_core.cluster.rpc.merge_results` makes them
        one.
        """
        group = self.get(role, deployment, kept=kept)
        name = stage or deployment.stage
        results: list[dict[str, Any]] = group.call(
            method,
            stage=name,
            iteration=iteration,
            deadline_seconds=self._config.deadlines.stage,
            on_progress=lambda progress: self._listener(name, iteration, progress),
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

    def _of(self, role: str) -> list[Group]:
        with self._lock:
            return [group for key, group in self._groups.items() if key[0] == role]

    def interrupt(self) -> None:
        """Stop every group now, from any thread; calls and starts under way raise."""
        self.stop_requested.set()
        self.stop_all(grace_seconds=2.0, parking_seconds=_PARKING_SECONDS)

    def close(self) -> None:
        """Stop every group, those that are being started too; none starts any more."""
        with self._lock:
            self._closing = True
        self.stop_all(_GRACE_SECONDS)
        for thread in self._threads:
            thread.join(self._config.deadlines.start)
        # One that was about to begin when the others were stopped.
        self.stop_all(_GRACE_SECONDS)

    def stop_all(self, grace_seconds: float, parking_seconds: float = 0.0) -> None:
        """Stop every group that there is, side by side; others may start. parking_seconds: the
        least grace of those that park what they play."""
        with self._lock:
            groups = dict(self._groups)
        parks = self._config.schedule.mode == "stream"
        longer = max(grace_seconds, parking_seconds)
        graces = [longer if parks and role == "rollout" else grace_seconds for role, _ in groups]
        if groups:
            with ThreadPoolExecutor(len(groups)) as pool:
                list(pool.map(lambda group, grace: group.stop(grace), groups.values(), graces))
