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
import queue
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from earl_core.cluster.errors import LogFile
from earl_core.cluster.host import Host, Launch, LocalHost, LocalRank
from earl_core.system.errors import ConfigError

logger = logging.getLogger(__name__)

_CHUNK = 1 << 18
_STREAMS = ("control", "channel")
_IN_FLIGHT = 16
"""Messages on their way to a host before the sender waits for the first of them."""
_PING_SECONDS = 2.0
_SILENT_SECONDS = 15.0
"""A host that does not answer for so long is lost, whatever Ray still thinks of it."""
_ANSWER_SECONDS = 300.0
"""For what starts a rank: the host may be importing torch."""

Piece = tuple[int, str, bytes]
"""Bytes of a rank's stream, by the rank's number at its daemon; none at all: the stream's end."""


class HostDaemon:
    """In an actor on each host."""

    def __init__(self, name: str) -> None:
        self._host = LocalHost(name, ray.util.get_node_ip_address())
        self._ranks: dict[int, LocalRank] = {}
        self._numbers = itertools.count()
        self._out: queue.Queue[Piece] = queue.Queue(maxsize=256)
        self._selector = selectors.DefaultSelector()
        self._changes, changed = socket.socketpair()
        self._selector.register(changed, selectors.EVENT_READ, None)
        self._lock = threading.Lock()
        threading.Thread(target=self._read, name="earl-daemon-reader", daemon=True).start()

    def address(self) -> str:
        """The host's address, where its ranks listen."""
        return self._host.address

    @ray.method(concurrency_group="ping")
    def ping(self) -> None:
        """Answer."""

    def start(self, launch: Sequence[Any]) -> tuple[int, tuple[str, int]]:
        """Start a rank; its number here, and where rank 0 listens. Raises `OSError`."""
        module, log, environment, meeting = launch
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        rank = self._host.start(Launch(module, Path(log), environment, meeting))
        with self._lock:
            number = next(self._numbers)
            self._ranks[number] = rank
            for stream in _STREAMS:
                end = getattr(rank, stream)
                self._selector.register(end, selectors.EVENT_READ, (number, stream))
        self._changes.send(b"\n")
        return number, rank.meeting

    def _read(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    key.fileobj.recv(64)  # type: ignore[union-attr]
                    continue
                data = b""
                with suppress(OSError):
                    data = key.fileobj.recv(_CHUNK)  # type: ignore[union-attr]
                if not data:
                    self._selector.unregister(key.fileobj)
                self._out.put((*key.data, data))

    @ray.method(concurrency_group="out")
    def received(self) -> Iterator[list[Piece]]:
        """What the ranks and their supervisors send, until this process ends."""
        while True:
            pieces = [self._out.get()]
            with suppress(queue.Empty):
                while len(pieces) < _IN_FLIGHT:
                    pieces.append(self._out.get_nowait())
            yield pieces

    @ray.method(concurrency_group="in")
    def send(self, pieces: list[Piece]) -> None:
        """Pass bytes on, in the order of the calls; an end closes the stream."""
        for number, stream, data in pieces:
            end: socket.socket = getattr(self._ranks[number], stream)
            # One that is gone is reported by its supervisor.
            with suppress(OSError):
                if data:
                    end.sendall(data)
                else:
                    end.shutdown(socket.SHUT_RDWR)

    def kill(self, number: int) -> None:
        """See `RankProcess`."""
        self._ranks[number].kill()

    def end(self, number: int, pid: int | None) -> None:
        """See `RankProcess`."""
        self._ranks[number].end(pid)

    def lost(self, number: int) -> str:
        """See `RankProcess`."""
        return self._ranks[number].lost()

    def close(self, number: int) -> None:
        """See `RankProcess`."""
        self._ranks.pop(number).close()

    def log_bytes(self, path: str) -> int:
        """Present size of a file, 0 without one."""
        with suppress(OSError):
            return Path(path).stat().st_size
        return 0


class RayHost:
    """See `Host`. What goes wrong on the way to the daemon makes it `lost`, with the reason."""

    def __init__(self, name: str, daemon: Any) -> None:
        self.name = name
        self.lost = ""
        self._daemon = daemon
        self.address: str = self.ask("address")
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
        except RayError as error:
            if isinstance(cause := getattr(error, "cause", None), OSError):
                raise cause from None
            self.lose(str(error).strip().split("\n")[0])
        raise ConnectionError(self.lost)

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
                    data = key.fileobj.recv(_CHUNK)  # type: ignore[union-attr]
                if not data:
                    self._selector.unregister(key.fileobj)
                pieces.append((*key.data, data))
            if pieces:
                sent.append(self._daemon.send.remote(pieces))
            if len(sent) > _IN_FLIGHT:
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


class RayCluster:
    """Whole hosts of a Ray cluster, reserved for one run."""

    def __init__(
        self, address: str, hosts: int, cpus: float, gpus: float = 0, *, seconds: float = 300.0
    ) -> None:
        """Reserve `hosts` hosts of `cpus` cores and `gpus` GPUs each and start their daemons.

        Raises `ConfigError` when the cluster has not so many free.
        """
        if not ray.is_initialized():
            ray.init(address=address, namespace="earl", log_to_driver=False)
        bundle = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
        self._group = placement_group([bundle] * hosts, strategy="STRICT_SPREAD")
        if not self._group.wait(seconds):
            remove_placement_group(self._group)
            raise ConfigError(
                f"the Ray cluster has no {hosts} hosts with {cpus:g} free cores and {gpus:g} free "
                f"GPUs each within {seconds:.0f} s: see `ray status`, or lower cluster.hosts"
            )
        daemon = ray.remote(concurrency_groups={"out": 1, "in": 1, "ping": 1})(HostDaemon)
        self._daemons = [
            daemon.options(
                num_cpus=cpus,
                num_gpus=gpus,
                max_restarts=0,
                max_concurrency=16,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=index
                ),
            ).remote(f"host-{index}")
            for index in range(hosts)
        ]
        self._hosts = [RayHost(f"host-{index}", each) for index, each in enumerate(self._daemons)]

    def hosts(self) -> list[Host]:
        """Those that are not lost."""
        return [host for host in self._hosts if not host.lost]

    def close(self) -> None:
        """End the daemons, and with them all that they started; give the hosts back."""
        for daemon in self._daemons:
            ray.kill(daemon)
        remove_placement_group(self._group)
