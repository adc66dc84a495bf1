"""Hosts of a Ray cluster. Each has a daemon, an actor that starts ranks and carries their bytes.

    controller                                        host
    WorkerGroup ── sockets ── RayHost ═ Ray's calls ═ HostDaemon ── sockets ── supervisor, rank

Ray gives membership, the reservation of whole hosts, the launching of the daemons and the news of
their death. Ranks are no actors: Ray ends only direct children of a worker, and a placement group
cannot be resized while stage deployments change. When a daemon ends, in whatever way, so does the
fork server that it started, and with it all ranks of the host. Nothing else imports ray.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from earl_core.cluster.errors import LogFile
from earl_core.cluster.host import Host, Launch
from earl_core.cluster.host_daemon import CHUNK, IN_FLIGHT, HostDaemon, Piece, memory_of
from earl_core.system.errors import ConfigError
from earl_core.system.hardware import HostResources

logger = logging.getLogger(__name__)

_PING_SECONDS = 2.0
_SILENT_SECONDS = 15.0
"""A host that does not answer for so long is lost, whatever Ray still thinks of it."""
_ANSWER_SECONDS = 300.0
"""For what starts a rank: the host may be importing torch."""


class _Daemon(HostDaemon):
    """The actor."""

    def __init__(self, cpus: int) -> None:
        super().__init__(ray.util.get_node_ip_address(), cpus)

    @ray.method(concurrency_group="ping")
    def ping(self) -> None:
        """Answer."""

    @ray.method(concurrency_group="out")
    def received(self) -> Iterator[list[Piece]]:
        yield from super().received()

    @ray.method(concurrency_group="in")
    def send(self, pieces: list[Piece]) -> None:
        super().send(pieces)


class RayHost:
    """See `Host`. What goes wrong on the way to the daemon makes it `lost`, with the reason."""

    def __init__(self, daemon: Any, directory: str) -> None:
        self.lost = ""
        self._daemon = daemon
        self.name = "a host of the Ray cluster"
        facts = self.ask("facts", directory, os.getcwd())
        self.name = facts["name"]
        self.address: str = facts["address"]
        self.resources = HostResources(**facts["resources"])
        self._memory_is_here = facts["memory"] == memory_of(directory)
        self._lock = threading.Lock()
        self._ranks: dict[int, RayRank] = {}
        self._selector = selectors.DefaultSelector()
        self._changes, changed = socket.socketpair()
        self._selector.register(changed, selectors.EVENT_READ, None)
        for work in (self._receive, self._send, self._watch):
            name = f"earl-host-{work.__name__.strip('_')}"
            threading.Thread(target=work, name=name, daemon=True).start()

    def ask(self, method: str, *arguments: Any, seconds: float = _ANSWER_SECONDS) -> Any:
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
            self.lose(str(error).strip().split("\n")[0])
        raise ConnectionError(self.lost)

    def rename(self, name: str) -> None:
        """Another name, should another host have the same."""
        self.ask("rename", name)
        self.name = name

    def preload(self, modules: Sequence[str]) -> None:
        """See `Host`."""
        self._daemon.preload.remote(list(modules))

    def keep(self, target: str, *arguments: Any) -> Callable[..., Any] | None:
        """See `Host`."""
        if self._memory_is_here:
            return None
        self.ask("keep", target, arguments)
        return lambda method, *given: self.ask("use", method, given)

    def start(self, launch: Launch) -> RayRank:
        """See `Host`."""
        given = [launch.module, str(launch.log), dict(launch.environment), launch.meeting]
        number, meeting = self.ask("start", given)
        rank = RayRank(self, number, meeting)
        with self._lock:
            self._ranks[number] = rank
            for stream, end in rank.ends.items():
                self._selector.register(end, selectors.EVENT_READ, (number, stream))
        self._changes.send(b"\n")
        return rank

    def log(self, path: Path) -> LogFile:
        """See `Host`."""
        return LogFile(path, self.ask("log_bytes", str(path)))

    def lose(self, reason: str) -> None:
        """The host is lost: all its streams end."""
        if not self.lost:
            logger.warning("host %s is lost: %s", self.name, reason)
            self.lost = f"host {self.name} is lost: {reason}"
        with self._lock:
            for rank in self._ranks.values():
                for end in rank.ends.values():
                    with suppress(OSError):
                        end.shutdown(socket.SHUT_WR)

    def _receive(self) -> None:
        try:
            for reference in self._daemon.received.remote():
                for number, stream, data in ray.get(reference):
                    self._pass_on(number, stream, data)
        except RayError as error:
            self.lose(str(error).strip().split("\n")[0])

    def _pass_on(self, number: int, stream: str, data: bytes) -> None:
        with self._lock:
            rank = self._ranks.get(number)
        # Bytes may come before `start` has returned here, and after `close`.
        limit = time.monotonic() + _PING_SECONDS
        while rank is None and time.monotonic() < limit:
            time.sleep(0.005)
            with self._lock:
                rank = self._ranks.get(number)
        if rank is None:
            return
        with suppress(OSError):
            if data:
                rank.ends[stream].sendall(data)
            else:
                rank.ends[stream].shutdown(socket.SHUT_WR)

    def _send(self) -> None:
        sent: list[Any] = []
        while not self.lost:
            pieces: list[Piece] = []
            for key, _ in self._selector.select(_PING_SECONDS):
                if key.data is None:
                    key.fileobj.recv(64)  # type: ignore[union-attr]
                    continue
                data = b""
                with suppress(OSError):
                    data = key.fileobj.recv(CHUNK)  # type: ignore[union-attr]
                if not data:
                    self._selector.unregister(key.fileobj)
                pieces.append((*key.data, data))
            if pieces:
                sent.append(self._daemon.send.remote(pieces))
            if len(sent) > IN_FLIGHT:
                with suppress(RayError):
                    ray.get(sent.pop(0), timeout=_SILENT_SECONDS)

    def _watch(self) -> None:
        heard = time.monotonic()
        while not self.lost:
            try:
                ray.get(self._daemon.ping.remote(), timeout=_PING_SECONDS)
                heard = time.monotonic()
            except RayError as error:
                if time.monotonic() - heard > _SILENT_SECONDS:
                    self.lose(f"it was silent for {_SILENT_SECONDS:.0f} s")
                elif not isinstance(error, GetTimeoutError):
                    self.lose(str(error).strip().split("\n")[0])
            time.sleep(_PING_SECONDS)

    def forget(self, number: int) -> None:
        """A rank whose streams are closed."""
        with self._lock:
            self._ranks.pop(number, None)


class RayRank:
    """See `RankProcess`. `ends` are the far ends of the two sockets, which `RayHost` serves."""

    def __init__(self, host: RayHost, number: int, meeting: tuple[str, int]) -> None:
        self._host, self._number = host, number
        self.meeting = (meeting[0], meeting[1])
        self.control, control = socket.socketpair()
        self.channel, channel = socket.socketpair()
        self.ends = {"control": control, "channel": channel}

    def lost(self) -> str:
        """See `RankProcess`."""
        try:
            return str(self._host.ask("lost", self._number, seconds=_SILENT_SECONDS))
        except ConnectionError as error:
            return str(error)

    def kill(self) -> None:
        """See `RankProcess`."""
        with suppress(ConnectionError):
            self._host.ask("kill", self._number, seconds=_SILENT_SECONDS)

    def end(self, pid: int | None) -> None:
        """See `RankProcess`. The ranks of a lost host end with its daemon."""
        with suppress(ConnectionError):
            self._host.ask("end", self._number, pid)

    def close(self) -> None:
        """See `RankProcess`."""
        self.control.close()
        self.channel.close()
        with suppress(ConnectionError):
            self._host.ask("close", self._number, seconds=_SILENT_SECONDS)
        self._host.forget(self._number)


def _connect(address: str | None) -> bool:
    """Connect this process, if it is not. Raises `ConfigError` where no cluster is."""
    if ray.is_initialized():
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


class RayCluster:
    """Whole hosts of a Ray cluster, reserved for one run."""

    def __init__(
        self,
        address: str | None,
        hosts: int,
        cpus: int,
        gpus: int,
        directory: str,
        *,
        insecure: bool = False,
        seconds: float = 300.0,
    ) -> None:
        """Reserve `hosts` hosts of `cpus` cores and `gpus` GPUs each and start their daemons.

        directory: where shards lie on each. insecure: whatever the cluster asks of who commands it.
        Raises `ConfigError` when the cluster has not so many free.
        """
        self._connected = _connect(address)
        if not insecure:
            _check_token()
        bundle = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
        self._group = placement_group([bundle] * hosts, strategy="STRICT_SPREAD")
        if not self._group.wait(seconds):
            remove_placement_group(self._group)
            raise ConfigError(
                f"the Ray cluster has no {hosts} hosts with {cpus} free cores and {gpus} free "
                f"GPUs each within {seconds:.0f} s: see `ray status`, or lower cluster.hosts"
            )
        daemon = ray.remote(concurrency_groups={"out": 1, "in": 1, "ping": 1})(_Daemon)
        self._daemons = [
            daemon.options(
                num_cpus=cpus,
                num_gpus=gpus,
                max_restarts=0,
                max_concurrency=16,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=index
                ),
            ).remote(cpus)
            for index in range(hosts)
        ]
        self._hosts = [RayHost(each, directory) for each in self._daemons]
        named = Counter(host.name for host in self._hosts)
        for host in self._hosts:
            if named[host.name] > 1:
                host.rename(f"{host.name}-{host.address}")

    def hosts(self) -> Sequence[Host]:
        """Those that are not lost."""
        return [host for host in self._hosts if not host.lost]

    def close(self) -> None:
        """End the daemons, and with them all that they started; give the hosts back."""
        for host in self._hosts:
            host.lost = host.lost or f"host {host.name} was given back"
        for daemon in self._daemons:
            ray.kill(daemon)
        remove_placement_group(self._group)
        if self._connected:
            ray.shutdown()
