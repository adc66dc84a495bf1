"""Hosts of a Ray cluster. Each has a daemon, an actor that starts ranks and carries their bytes.

    controller                                        host
    WorkerGroup ── sockets ── RayHost ═ Ray's calls ═ HostDaemon ── sockets ── supervisor, rank

Ray gives membership, the reservation of whole hosts, the launching of the daemons and the news of
their death. Ranks are no actors: Ray ends only direct children of a worker, and a placement group
cannot be resized while stage deployments change. When a daemon ends, in whatever way, so does the
fork server that it started, and with it all ranks of the host. Nothing else imports ray.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

# Ray reads it when it is imported. It tries 20 times, and a time takes 40 s.
os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    RayError,
    RayTaskError,
)
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from earl_core.cluster.errors import LogFile
from earl_core.cluster.host import Host, Launch
from earl_core.cluster.host_daemon import (
    ANSWER_SECONDS,
    UNANSWERED_SECONDS,
    HostDaemon,
    RemoteRank,
    memory_of,
)
from earl_core.cluster.streams import Piece, Streams
from earl_core.system.errors import ConfigError
from earl_core.system.hardware import HostResources

logger = logging.getLogger(__name__)

T = TypeVar("T")

NODE_ID = "ray.io/node-id"
"""Ray's own label of a node."""
_PING_SECONDS = 2.0
_END_SECONDS = 5.0
_IN_FLIGHT = 16
"""Messages on their way to a host before the sender waits for the first of them."""
_MORE_SECONDS = 10.0
"""Seconds to wait for more hosts than a run needs: one that just died may still be listed."""


class _Daemon(HostDaemon):
    """The actor."""

    def __init__(self, cpus: int) -> None:
        super().__init__(ray.util.get_node_ip_address(), cpus)

    @ray.method(concurrency_group="ping")
    def ping(self) -> None:
        super().ping()

    @ray.method(concurrency_group="out")
    def received(self) -> Iterator[list[Piece]]:
        yield from super().received()

    @ray.method(concurrency_group="in")
    def send(self, number: int, pieces: list[Piece]) -> None:
        super().send(number, pieces)


def _reason(error: RayError) -> str:
    """Put Ray's error into the words of the field; its own have addresses and actors' numbers."""
    if isinstance(error, ActorUnavailableError):
        return "its connection broke"
    if isinstance(error, ActorDiedError):
        return "EARL's process there has ended"
    return str(error).strip().split("\n")[0]


class RayHost:
    """A `Host` behind a daemon in Ray. A failure to reach it is kept in `lost` as the reason."""

    def __init__(self, daemon: Any, directory: str) -> None:
        self.lost = ""
        self._daemon = daemon
        # A rank may be heard before its start has been answered.
        self._streams = Streams(patience=_PING_SECONDS)
        self._losing = threading.Lock()
        self._ended = threading.Event()
        self.name = "a host of the Ray cluster"
        facts = self.ask("facts", directory, os.getcwd())
        self.name = facts["name"]
        self.address: str = facts["address"]
        self.resources = HostResources(**facts["resources"])
        self._memory_is_here = facts["memory"] == memory_of(directory)
        works = self._receive, self._send, self._watch
        self._threads = [threading.Thread(target=work, daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    def ask(self, method: str, *arguments: Any, seconds: float = ANSWER_SECONDS) -> Any:
        """Call the daemon and wait. Raises `ConnectionError` when the host is lost."""
        if self.lost:
            raise ConnectionError(self.lost)
        try:
            return ray.get(getattr(self._daemon, method).remote(*arguments), timeout=seconds)
        except GetTimeoutError:
            self.lose(f"it did not answer for {seconds:.0f} s")
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            self.lose(_reason(error))
        raise ConnectionError(self.lost)

    def preload(self, modules: Sequence[str]) -> None:
        """Have the daemon preload the modules, without waiting for it."""
        self._daemon.preload.remote(list(modules))

    def keep(self, target: str, *arguments: Any) -> Callable[..., Any] | None:
        """Have the daemon build and keep the target; None where its memory is this host's."""
        if self._memory_is_here:
            return None
        self.ask("keep", target, arguments)
        return lambda method, *given: self.ask("use", target, method, given)

    def start(self, launch: Launch) -> RemoteRank:
        """Have the daemon start the rank, and join its streams to the ends that are here."""
        given = [launch.module, str(launch.log), dict(launch.environment), launch.meeting]
        number, meeting = self.ask("start", given)
        rank = RemoteRank(self.ask, self._streams.remove, number, meeting)
        self._streams.add(number, rank.ends)
        return rank

    def log(self, path: Path) -> LogFile:
        """Ask the daemon for the log's present end, from which the log is then read."""
        return LogFile(path, self.ask("log_bytes", str(path)))

    def lose(self, reason: str) -> None:
        """The host is lost: all its streams end."""
        with self._losing:
            if not self.lost:
                logger.warning("host %s is lost: %s", self.name, reason)
                self.lost = f"host {self.name} is lost: {reason}"
        self.give_back()

    def give_back(self) -> None:
        """Let nobody use the host any more; its threads end, the last with its daemon."""
        self.lost = self.lost or f"host {self.name} was given back"
        self._ended.set()
        self._streams.end_all()

    def ended(self, limit: float) -> bool:
        """Tell whether no thread calls Ray for the host any more, at the latest at this time."""
        for thread in self._threads:
            thread.join(max(0.0, limit - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _receive(self) -> None:
        try:
            for reference in self._daemon.received.remote():
                self._streams.deliver(ray.get(reference))
        except RayError as error:
            self.lose(_reason(error))

    def _send(self) -> None:
        sent: list[Any] = []
        numbers = itertools.count()
        while not self.lost:
            if pieces := self._streams.collect(_PING_SECONDS):
                sent.append(self._daemon.send.remote(next(numbers), pieces))
            if len(sent) > _IN_FLIGHT:
                with suppress(RayError):
                    ray.get(sent.pop(0), timeout=UNANSWERED_SECONDS)

    def _watch(self) -> None:
        heard = time.monotonic()
        while not self.lost:
            try:
                ray.get(self._daemon.ping.remote(), timeout=_PING_SECONDS)
                heard = time.monotonic()
            except RayError as error:
                if time.monotonic() - heard > UNANSWERED_SECONDS:
                    self.lose(f"it was silent for {UNANSWERED_SECONDS:.0f} s")
                elif not isinstance(error, GetTimeoutError):
                    self.lose(_reason(error))
            self._ended.wait(_PING_SECONDS)


def _ask_head(function: Callable[[], T]) -> T:
    """Ask Ray's head what Ray gives no deadline. Raises `ConnectionError`."""
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, name="earl-ray-head", daemon=True).start()
    try:
        return answer.result(UNANSWERED_SECONDS)
    except FutureTimeout:
        raise ConnectionError(
            f"the head of the Ray cluster was silent for {UNANSWERED_SECONDS:.0f} s"
        ) from None


def _connect(address: str | None) -> bool:
    """Connect this process, if it is not. Raises `ConfigError` where no cluster is."""
    if ray.is_initialized():
        try:
            _ask_head(ray.nodes)
        except ConnectionError as error:
            raise ConfigError(f"{error}: start the cluster again") from error
        return False
    where = address or "auto"
    try:
        ray.init(where, namespace="earl", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"no Ray cluster can be used at cluster.address {where!r} ({reason}): start one with "
            "`ray start`, or correct the address"
        ) from error
    return True


def _check_token() -> None:
    """Raise `ConfigError` for a cluster that others can reach and that wants no token."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "token":
        return
    addresses = [str(node["NodeManagerAddress"]) for node in ray.nodes()]
    if not all(ip_address(address).is_loopback for address in addresses):
        raise ConfigError(
            "the Ray cluster takes commands from everybody: start it, and this, with "
            "RAY_AUTH_MODE=token (`ray get-auth-token --generate` makes a token), or set "
            "cluster.insecure=true in a network of your own"
        )


def _reserve(hosts: range, bundle: Mapping[str, int], seconds: float) -> PlacementGroup:
    """Reserve as many whole hosts as are free. Raises `ConfigError` for fewer than the least."""
    fitting = [
        node
        for node in ray.nodes()
        if node["Alive"] and all(node["Resources"].get(k, 0) >= n for k, n in bundle.items())
    ]
    fewest, most = hosts[0], hosts[-1]
    for count in range(max(fewest, min(most, len(fitting))), fewest - 1, -1):
        group = placement_group([dict(bundle)] * count, strategy="STRICT_SPREAD")
        if group.wait(seconds if count == fewest else _MORE_SECONDS):
            return group
        remove_placement_group(group)
    raise ConfigError(
        f"the Ray cluster has no {fewest} hosts with {bundle['CPU']} free cores and "
        f"{bundle.get('GPU', 0)} free GPUs each within {seconds:.0f} s: see `ray status`, or lower "
        "cluster.hosts"
    )


class RayCluster:
    """Whole hosts of a Ray cluster, reserved for one run."""

    def __init__(
        self,
        address: str | None,
        hosts: range,
        cpus: int,
        gpus: int,
        directory: str,
        *,
        insecure: bool = False,
        seconds: float = 300.0,
    ) -> None:
        """Reserve hosts of `cpus` cores and `gpus` GPUs each and start their daemons.

        hosts: numbers of them that will do. directory: where shards lie on each. insecure: whatever
        the cluster asks of who commands it. seconds: to wait for the least number. Raises
        `ConfigError` when the cluster has not so many free.
        """
        self._connected = _connect(address)
        self._bundle = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
        self._groups: list[PlacementGroup] = []
        self._daemons: list[Any] = []
        self._hosts: list[RayHost] = []
        self._further: PlacementGroup | None = None
        try:
            if not insecure:
                _check_token()
            group = _reserve(hosts, self._bundle, seconds)
            self._groups.append(group)
            self._start(group, cpus, gpus)
            self._meet(directory, hosts[0])
            if len(self._hosts) < hosts[-1]:
                self._further = self._ask_for_another(group)
                self._groups.append(self._further)
        except BaseException:
            self.close()
            raise

    def _start(self, group: PlacementGroup, cpus: int, gpus: int) -> None:
        """Start the daemons."""
        daemon = ray.remote(concurrency_groups={"out": 1, "in": 1, "ping": 1})(_Daemon)
        self._daemons = [
            daemon.options(
                num_cpus=cpus,
                num_gpus=gpus,
                max_restarts=0,
                max_concurrency=16,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=index
                ),
            ).remote(cpus)
            for index in range(group.bundle_count)
        ]

    def _meet(self, directory: str, fewest: int) -> None:
        """Wait for the daemons. Raises `ConfigError` when fewer than so many answer."""
        reason = ""
        for daemon in self._daemons:
            try:
                self._hosts.append(RayHost(daemon, directory))
            except ConnectionError as error:
                reason = str(error)
        if len(self._hosts) < fewest:
            raise ConfigError(f"{reason}: see `ray status`, or lower cluster.hosts")
        named = Counter(host.name for host in self._hosts)
        for host in self._hosts:
            if named[host.name] > 1:
                host.name = f"{host.name}-{host.address}"
                host.ask("rename", host.name)

    def _ask_for_another(self, group: PlacementGroup) -> PlacementGroup:
        """A reservation of one more host, to be fulfilled whenever there is one."""
        nodes = placement_group_table(group)["bundles_to_node_id"].values()
        others = {NODE_ID: f"!in({','.join(sorted(nodes))})"}
        return placement_group([self._bundle], bundle_label_selector=[others])

    def hosts(self) -> Sequence[Host]:
        """List the hosts that are not lost."""
        return [host for host in self._hosts if not host.lost]

    def lost(self) -> str:
        """Ask the daemons of all hosts, as `Cluster` wants; return the reasons of lost ones."""
        for host in self._hosts:
            with suppress(ConnectionError):
                host.ask("ping", seconds=UNANSWERED_SECONDS)
        return "; ".join(host.lost for host in self._hosts if host.lost)

    def can_grow(self) -> bool:
        """Tell whether Ray has reserved the further host."""
        further = self._further
        if further is None:
            return False
        with suppress(ConnectionError):
            return bool(_ask_head(lambda: placement_group_table(further))["state"] == "CREATED")
        return False

    def close(self) -> None:
        """End the daemons, and with them all that they started; give the hosts back."""
        for host in self._hosts:
            host.give_back()
        # Without a head the daemons end because nobody asks them any more.
        with suppress(ConnectionError):
            _ask_head(self._give_back)

    def _give_back(self) -> None:
        for daemon in self._daemons:
            ray.kill(daemon)
        for group in self._groups:
            remove_placement_group(group)
        # A call into Ray after its shutdown ends this process, with exit status 1.
        limit = time.monotonic() + _END_SECONDS
        ended = [host.ended(limit) for host in self._hosts]
        if self._connected and all(ended):
            ray.shutdown()
