"""Worker groups: the ranks of a stage, started, called and stopped together."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from earl_core.cluster.errors import Where, WorkerCallFailed, WorkerError, WorkerLost
from earl_core.cluster.host import Host, Launch, LocalHost, MemoryUse, RankHandle, rank_variables
from earl_core.cluster.rpc import Aborted, Exchange, Json, Monitor, Progress, loss_error
from earl_core.system.frames import encode
from earl_core.system.processes import ENDING_GRACE_SECONDS

_running: set[WorkerGroup] = set()


class WorkerGroup:
    """Ranks, each a process with one target object, that answer calls to its methods.

    `target` is `"package.module:Class"`; each rank builds `Class(context, deployment, **arguments)`
    and keeps it until `stop()`. It sees the controller's import path. A group runs one call at a
    time; callers wait for those before them. A `WorkerLost` ends the group: `alive` is False, and
    `start()` makes a fresh one. After `WorkerCallFailed` of a call the group stays usable if every
    rank has answered.

    The ranks' output goes to `<log_directory>/<role>-<rank>.log`. `environment` is added to the
    environment of the host's own process; `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `MASTER_ADDR` and
    `MASTER_PORT` are set as torch.distributed wants them. The calling thread runs `on_progress`,
    which gets the reported dictionary and `"rank"`.

    All processes of the group end when this one ends, in whatever way. Threads may share a group.
    """

    def __init__(
        self,
        role: str,
        target: str,
        *,
        log_directory: Path,
        environment: Mapping[str, str] | None = None,
        start_timeout_seconds: float = 180.0,
        heartbeat_seconds: float = 1.0,
        heartbeat_timeout_seconds: float = 60.0,
    ) -> None:
        self.role = role
        self._target = target
        self._log_directory = Path(log_directory)
        self._environment = dict(environment or {})
        self._here = LocalHost()
        self._start_timeout = start_timeout_seconds
        self._heartbeat = heartbeat_seconds
        self._heartbeat_timeout = heartbeat_timeout_seconds
        self._condition = threading.Condition()
        self._lifecycle = threading.RLock()
        self._starting: threading.Event | None = None
        self._monitor: Monitor | None = None
        self._deployment: Json | None = None
        self._memory: list[MemoryUse] = []
        self._callers: deque[int] = deque()
        self._call_ids = itertools.count(1)

    # -- state ------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """True while every rank is up and the group can take a call."""
        monitor = self._monitor
        return (
            self._deployment is not None
            and monitor is not None
            and monitor.loss is None
            and not monitor.closing
        )

    @property
    def deployment(self) -> Json | None:
        """The dumped StageDeployment that the ranks follow; None when the group is not alive."""
        return self._deployment if self.alive else None

    @property
    def pids(self) -> list[int]:
        """The ranks' process ids in rank order; empty when the group is not alive."""
        monitor = self._monitor
        if monitor is None or not self.alive:
            return []
        return [rank.pid for rank in monitor.ranks if rank.pid is not None]

    @property
    def memory(self) -> list[MemoryUse]:
        """Memory that each rank used, in rank order; empty before the first start."""
        monitor = self._monitor
        return self._memory if monitor is None else [rank.memory for rank in monitor.ranks]

    @property
    def silent_loss(self) -> str:
        """Reason why the group was lost, if no call has raised that; empty otherwise."""
        monitor = self._monitor
        if monitor is None or monitor.loss is None or monitor.told or monitor.closing:
            return ""
        return monitor.loss.reason

    # -- life -------------------------------------------------------------------------------------

    def start(
        self,
        deployment: Json,
        arguments: Json,
        world_size: int = 1,
        hosts: Sequence[Host] | None = None,
    ) -> None:
        """End what runs, start `world_size` ranks and return once every target is built.

        hosts: of each rank, those of one host one after the other; None: all run on this machine.
        Raises `WorkerCallFailed` when a target cannot be imported or built, `WorkerLost` otherwise
        (its `how` is `deadline` for the start timeout); nothing is left then.
        """
        abort = threading.Event()
        with self._lifecycle:
            self._stop(grace_seconds=10.0)
            self._starting = abort
            where, call_id = Where(self.role, None, "start", "", None), next(self._call_ids)
            try:
                hosts = hosts or [self._here] * world_size
                frames = self._start_frames(call_id, deployment, arguments, hosts)
                monitor = self._spawn(hosts)
                Exchange(monitor, where, call_id, frames, self._start_timeout, abort).run()
                self._deployment = deployment
            except BaseException as error:
                self._stop(grace_seconds=0.0)
                if isinstance(error, Aborted):
                    raise WorkerLost(where, "the start was cancelled") from None
                if isinstance(error, ConnectionError):
                    raise WorkerLost(where, str(error)) from error
                raise
            finally:
                self._starting = None

    def _start_frames(
        self, call_id: int, deployment: Json, arguments: Json, hosts: Sequence[Host]
    ) -> list[bytes]:
        message = {
            "kind": "start",
            "id": call_id,
            "target": self._target,
            "deployment": deployment,
            "arguments": arguments,
            "role": self.role,
            "hosts": [host.name for host in hosts],
            "heartbeat_seconds": self._heartbeat,
            "sys_path": [os.path.abspath(entry) for entry in sys.path],
        }
        return [
            encode({**message, "rank": rank, "log_path": str(self._log_path(rank))})
            for rank in range(len(hosts))
        ]

    def _spawn(self, hosts: Sequence[Host]) -> Monitor:
        """Start rank 0, which says where all meet, then the others on all hosts at once."""
        started: dict[int, RankHandle] = {}
        ranks_of: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            ranks_of.setdefault(host.name, []).append(rank)

        def start(ranks: Sequence[int], meeting: tuple[str, int] | None) -> None:
            for rank in ranks:
                started[rank] = self._start_rank(rank, hosts, meeting)

        try:
            start([0], None)
            meeting = started[0].process.meeting
            with ThreadPoolExecutor(len(ranks_of)) as pool:
                others = [[rank for rank in ranks if rank] for ranks in ranks_of.values()]
                for done in [pool.submit(start, ranks, meeting) for ranks in others]:
                    done.result()
        except BaseException:
            for handle in started.values():
                handle.process.close()
            raise
        ranks = [started[rank] for rank in range(len(hosts))]
        self._monitor = monitor = Monitor(ranks, self._condition, self._heartbeat_timeout)
        monitor.start()
        _running.add(self)
        return monitor

    def _start_rank(
        self, rank: int, hosts: Sequence[Host], meeting: tuple[str, int] | None
    ) -> RankHandle:
        log = hosts[rank].log(self._log_path(rank))
        numbers = rank_variables(rank, [host.name for host in hosts])
        launch = Launch(
            self._target.partition(":")[0], log.path, {**self._environment, **numbers}, meeting
        )
        process = hosts[rank].start(launch)
        return RankHandle(rank, process, log, self._heartbeat_timeout)

    def _log_path(self, rank: int) -> Path:
        return self._log_directory / f"{self.role}-{rank}.log"

    def stop(self, grace_seconds: float = 10.0) -> None:
        """Close the targets, then end all processes of the group; harmless when nothing runs.

        The targets have `grace_seconds` to return from `close()`, a call under way included, which
        is cancelled. Whatever is left then gets SIGTERM, and SIGKILL some seconds later.
        """
        starting = self._starting
        if starting is not None:
            starting.set()
        with self._lifecycle:
            self._stop(grace_seconds)

    def _stop(self, grace_seconds: float) -> None:
        monitor = self._monitor
        if monitor is None:
            return
        with self._condition:
            monitor.closing = True
            polite = monitor.loss is None and grace_seconds > 0
        if polite:
            frames = [encode({"kind": "cancel", "id": monitor.call_id}), encode({"kind": "close"})]
            for rank in monitor.ranks:
                for frame in frames:
                    rank.send(frame)
            monitor.finished.wait(grace_seconds)
        with self._condition:
            monitor.end()
        if not monitor.finished.wait(3 * ENDING_GRACE_SECONDS):
            # A supervisor that is stuck itself: without it the monitor ends its rank by the mark.
            for rank in monitor.ranks:
                rank.process.kill()
            monitor.finished.wait(3 * ENDING_GRACE_SECONDS)
        monitor.join(1.0)
        with self._condition:
            self._memory = [rank.memory for rank in monitor.ranks]
            self._monitor = None
            self._deployment = None
            self._condition.notify_all()
        for rank in monitor.ranks:
            rank.process.close()
        _running.discard(self)

    # -- calls ------------------------------------------------------------------------------------

    def call(
        self,
        method: str,
        *,
        stage: str,
        iteration: int,
        deadline_seconds: float,
        on_progress: Progress | None = None,
        abort: threading.Event | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """Run `method(**arguments)` in every rank and return its JSON results in rank order.

        `stage` and `iteration` reach the target through its context. The deadline counts from when
        the call is sent, after any call before it. Ctrl-C, an `on_progress` that raises, and
        `abort`, once it is set, cancel the call; the group is then idle or ended. Raises the errors
        of `earl_core.cluster.errors` (`WorkerLost` after `abort`), and `WireError` for arguments
        that are not JSON or too large.
        """
        where = Where(self.role, None, method, stage, iteration)
        abort, call_id = abort or threading.Event(), next(self._call_ids)
        message = {
            "kind": "call",
            "id": call_id,
            "method": method,
            "stage": stage,
            "iteration": iteration,
            "arguments": arguments,
        }
        frame = encode(message)
        with self._turn(where, abort, call_id) as monitor:
            each = [frame] * len(monitor.ranks)
            exchange = Exchange(monitor, where, call_id, each, deadline_seconds, abort, on_progress)
            try:
                return exchange.run()
            except WorkerError:
                raise
            except BaseException as error:
                exchange.give_up()
                if isinstance(error, Aborted):
                    raise WorkerLost(where, "the call was cancelled") from None
                raise

    def reshard(
        self, deployment: Json, *, stage: str, iteration: int, deadline_seconds: float
    ) -> list[Any]:
        """Have the ranks change to another stage deployment of as many ranks, state kept.

        Calls the targets' `reshard(deployment=...)`; its results in rank order. When any rank
        fails, the group is ended: the ranks' states need not fit together any more.
        """
        monitor = self._monitor
        try:
            results = self.call(
                "reshard",
                stage=stage,
                iteration=iteration,
                deadline_seconds=deadline_seconds,
                deployment=deployment,
            )
        except WorkerCallFailed:
            self.stop()
            raise
        with self._condition:
            # Unless another thread has started the group anew meanwhile.
            if self._monitor is monitor and self.alive:
                self._deployment = deployment
        return results

    @contextmanager
    def _turn(self, where: Where, abort: threading.Event, caller: int) -> Iterator[Monitor]:
        with self._condition:
            self._callers.append(caller)
        try:
            with self._condition:
                self._condition.wait_for(lambda: abort.is_set() or self._callers[0] == caller)
                monitor = self._monitor
                if monitor is not None and monitor.loss is not None:
                    raise loss_error(monitor, where)
                if monitor is None or not self.alive:
                    raise WorkerLost(where, "the group is not running; call start() first")
                if abort.is_set():
                    raise WorkerLost(where, "the call was cancelled before it began")
            yield monitor
        finally:
            with self._condition:
                self._callers.remove(caller)
                self._condition.notify_all()


def _stop_all() -> None:
    for group in list(_running):
        group.stop(grace_seconds=5.0)


atexit.register(_stop_all)
# A forked child must not stop its parent's groups at exit. That it has their connections too does
# no harm, because supervisors see the controller's own end.
os.register_at_fork(after_in_child=_running.clear)
