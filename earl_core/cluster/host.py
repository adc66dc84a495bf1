"""The machines that ranks run on, the controller's side of each rank, and how ranks meet.

There is this machine here; those of a Ray cluster are in `ray_cluster`. A host starts a rank and
gives the controller two byte streams, as sockets of the controller's own process whatever lies
between: `control` leads to the rank's supervisor, `channel` to the rank.

The ranks of a group meet at a port that no other process can take: rank 0's host binds a socket to
its address before it starts the rank, which inherits it. Left to itself torch.distributed listens
on every interface, at a port that was free some time before; its store knows no password.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from earl_core.cluster.errors import LogFile, describe_exit
from earl_core.cluster.fork_server import SupervisorHandle, fork_server, plain_temporary
from earl_core.cluster.supervisor import LISTENER
from earl_core.system.errors import ConfigError
from earl_core.system.files import private
from earl_core.system.frames import FrameBuffer, encode
from earl_core.system.hardware import HostResources, read_resources
from earl_core.system.processes import (
    ENDING_GRACE_SECONDS,
    Process,
    child_path,
    end_processes,
    host_name,
    inspect,
    marked,
    still,
)
from earl_core.system.storage_errors import naming

logger = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"


class Launch(NamedTuple):
    """The start of a rank. module: of its target. log: appended to. environment: added to the
    host's own. meeting: address and port at which rank 0 listens; None: this is rank 0."""

    module: str
    log: Path
    environment: Mapping[str, str]
    meeting: tuple[str, int] | None = None


class RankProcess(Protocol):
    """A rank that a host has started, with its supervisor."""

    control: socket.socket
    channel: socket.socket
    meeting: tuple[str, int]

    def lost(self) -> str:
        """Tell why `control` was closed before the supervisor said how the rank ended."""
        ...

    def kill(self) -> None:
        """Kill the supervisor; its rank then ends itself. Harmless when it is gone."""
        ...

    def end(self, pid: int | None) -> None:
        """End the rank (`pid`, if known) and all that it started, once the supervisor is gone."""
        ...

    def close(self) -> None:
        """Close both sockets, and wait a moment for the supervisor."""
        ...


class Host(Protocol):
    """A machine that runs ranks. name: as manifests have it. address: where its ranks listen.
    resources: what of it the run may use."""

    name: str
    address: str

    @property
    def resources(self) -> HostResources: ...

    def start(self, launch: Launch) -> RankProcess:
        """Raises `ConnectionError` when the host cannot start it, and another `OSError` when the
        host allows no more processes."""
        ...

    def log(self, path: Path) -> LogFile:
        """A rank's log, from its present end on."""
        ...

    def preload(self, modules: Sequence[str]) -> None:
        """Have modules of ours imported there before a rank needs them; returns at once."""
        ...

    def keep(self, target: str, *arguments: Any) -> Callable[..., Any] | None:
        """Build `target` ("package.module:Class") there, for as long as the run lasts; the result
        calls the method that its first argument names. None: this process shares the host's memory
        and needs nobody there. Raises what the target raises; as its calls, `ConnectionError` when
        the host is lost. Arguments and results are JSON."""
        ...


class LocalHost:
    """This machine, or a part of it."""

    def __init__(
        self, name: str = "", address: str = LOOPBACK, resources: HostResources | None = None
    ) -> None:
        self.name = name or host_name()
        self.address = address
        self._resources = resources

    @cached_property
    def resources(self) -> HostResources:
        """Resources that were given, or those that this process reads."""
        return self._resources or read_resources()

    def start(self, launch: Launch) -> LocalRank:
        """Fork the rank here, as `Host` wants. Rank 0 inherits a bound socket, whose port nobody
        else can take. A fork server that ended is replaced, once."""
        try:
            return self._start(launch)
        except ConnectionError as error:
            logger.warning("%s: a rank is forked from another", error)
            return self._start(launch)

    def _start(self, launch: Launch) -> LocalRank:
        if launch.meeting is not None:
            return LocalRank(self, launch, launch.meeting, ())
        with bind_listener(self.address) as listener:
            meeting = self.address, int(listener.getsockname()[1])
            return LocalRank(self, launch, meeting, (listener.fileno(),))

    def log(self, path: Path) -> LogFile:
        """Open the rank's log on this file system, from its present end on, and make its folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        return LogFile(path, path.stat().st_size if path.exists() else 0)

    def preload(self, modules: Sequence[str]) -> None:
        """Have the fork server import the modules, as `Host` wants."""
        fork_server().preload(*modules)

    def keep(self, target: str, *arguments: Any) -> None:
        """Return None, because this process shares the host's memory."""
        return None


class LocalRank:
    """A `RankProcess` that this host's fork server started."""

    supervisor: SupervisorHandle

    def __init__(
        self, host: LocalHost, launch: Launch, meeting: tuple[str, int], listener: Sequence[int]
    ) -> None:
        self._mark = uuid.uuid4().hex
        self.meeting = meeting
        self.control, control_child = socket.socketpair()
        self.channel, channel_child = socket.socketpair()
        environment = {
            **os.environ,
            **launch.environment,
            **plain_temporary(),
            "PYTHONPATH": child_path({**os.environ, **launch.environment}),
            "EARL_HOST": host.name,
            **meeting_variables(*meeting, host.address),
        }
        try:
            with naming(launch.log), open(launch.log, "ab", opener=private) as output:
                self.supervisor = fork_server().start(
                    launch.module,
                    [self._mark, launch.log.stem],
                    environment,
                    [output.fileno(), control_child.fileno(), channel_child.fileno(), *listener],
                )
        except BaseException:
            self.control.close()
            self.channel.close()
            raise
        finally:
            control_child.close()
            channel_child.close()

    def lost(self) -> str:
        """Tell from the supervisor's exit why the connection closed, as `RankProcess` does."""
        self.supervisor.wait(1.0)
        code = self.supervisor.exit_code
        if code is None:
            return "its supervisor process closed the connection"
        how = describe_exit(code, out_of_memory=False)
        return how.replace("its process", "its supervisor process")

    def kill(self) -> None:
        """Kill the supervisor, as `RankProcess` does."""
        self.supervisor.kill()

    def end(self, pid: int | None) -> None:
        """End the rank by its lifeline, as `RankProcess` wants; processes that stay are killed."""
        process = None if pid is None else inspect(pid)

        def remains() -> list[Process]:
            own = None if process is None else still(process)
            return [*([] if own is None else [own]), *marked(self._mark)]

        limit = time.monotonic() + ENDING_GRACE_SECONDS
        pause = 0.01
        while (living := remains()) and time.monotonic() < limit:
            time.sleep(pause)
            pause = min(2 * pause, 0.2)
        if living:
            end_processes(remains, grace_seconds=0.0)
        self.supervisor.kill()

    def close(self) -> None:
        """Close both sockets and wait a second for the supervisor."""
        self.control.close()
        self.channel.close()
        self.supervisor.wait(1.0)


class Cluster(Protocol):
    """The hosts of a run."""

    def hosts(self) -> Sequence[Host]:
        """List the hosts that are not lost."""
        ...

    def lost(self) -> str:
        """Asks every host; which of them are lost, and why. Empty: none."""
        ...

    def can_grow(self) -> bool:
        """Tell whether a further host is free, and opening the cluster again would take it."""
        ...

    def close(self) -> None:
        """Give them back; whatever still runs there ends."""
        ...


class LocalCluster:
    """This machine, or equal parts of it. Raises `ConfigError`."""

    def __init__(self, parts: int = 1) -> None:
        self._hosts = local_hosts(parts)

    def hosts(self) -> Sequence[Host]:
        """List the parts of this machine."""
        return self._hosts

    def lost(self) -> str:
        """Return nothing, because with this machine the controller is lost, too."""
        return ""

    def can_grow(self) -> bool:
        """Return false, because this machine has no further host."""
        return False

    def close(self) -> None:
        """Give nothing back, because nothing was reserved."""


def local_hosts(count: int) -> list[LocalHost]:
    """Divide this machine into `count` equal parts that work as hosts do. Raises `ConfigError`."""
    whole = read_resources()
    if count == 1:
        return [LocalHost(resources=whole)]
    if count > len(whole.cores) or whole.gpus % count:
        raise ConfigError(
            f"cluster.hosts is {count}, but this machine has {len(whole.cores)} CPU cores and "
            f"{whole.gpus} GPUs to divide equally: lower it"
        )
    parts = [whole.part(number, count) for number in range(count)]
    return [LocalHost(f"host-{n}", resources=part) for n, part in enumerate(parts)]


@dataclass(frozen=True)
class MemoryUse:
    """Memory of one rank and its children, in bytes, as of its last heartbeat or result.

    `rss_bytes` is the rank's own resident memory, mapped shards included. `tree_bytes` adds up the
    private memory (neither file nor shared memory) of the rank and all its children, and
    `tree_peak_bytes` is the most of that since the current or last call began, sampled at 4 Hz.
    """

    rss_bytes: int = 0
    tree_bytes: int = 0
    tree_peak_bytes: int = 0


class RankHandle:
    """A rank's state; the group's monitor thread keeps it up to date.

    `exit_code` is negative for a signal and None while the rank runs. `supervised` turns False when
    the supervisor is gone: either all is ended (`exit_code` is known), or it was killed and its
    host has to end the rank (`RankProcess.end`).
    """

    def __init__(
        self, rank: int, process: RankProcess, log: LogFile, send_timeout_seconds: float
    ) -> None:
        self.rank = rank
        self.process = process
        self.log = log
        self.pid: int | None = None
        self.exit_code: int | None = None
        self.out_of_memory = False
        self.supervised = True
        self.last_sign = time.monotonic()
        self.memory = MemoryUse()
        self.reply: dict[str, Any] | None = None
        self.replied_at = 0.0
        self.frames = FrameBuffer()
        self.events = FrameBuffer()
        # For sends: what is read has arrived already.
        process.channel.settimeout(send_timeout_seconds)

    def send(self, frame: bytes) -> bool:
        """Send a frame to the rank; False if it took nothing for the send timeout. A rank that is
        gone is no error here: its supervisor reports how it went."""
        try:
            self.process.channel.sendall(frame)
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    def end(self, grace_seconds: float, dump: bool = False) -> None:
        """Ask the supervisor to end everything; with `dump` the rank first logs its stacks."""
        with suppress(OSError):
            self.process.control.sendall(encode({"stop": grace_seconds, "dump": dump}))


def bind_listener(address: str = LOOPBACK) -> socket.socket:
    """A socket bound to a free port; nobody can connect until rank 0 listens."""
    listener = socket.socket()
    listener.bind((address, 0))
    return listener


def meeting_variables(address: str, port: int, own: str = LOOPBACK) -> dict[str, str]:
    """Name the meeting place of all ranks of one start. own: the address of the rank's host."""
    # Connections of gloo and NCCL ask for no password, and the host's own name may resolve to an
    # address that nothing can be reached at.
    interface = _interface_of(own)
    return {
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def rank_variables(rank: int, hosts: Sequence[str]) -> dict[str, str]:
    """A rank's number in its group and on its host. hosts: of each rank."""
    own = [number for number, host in enumerate(hosts) if host == hosts[rank]]
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(hosts)),
        "LOCAL_RANK": str(own.index(rank)),
        "LOCAL_WORLD_SIZE": str(len(own)),
    }


def _interface_of(address: str) -> str:
    """The network interface that has an address; Linux calls loopback `lo`."""
    if address != LOOPBACK:
        import psutil  # a third of a rank's start

        for name, held in psutil.net_if_addrs().items():
            if any(each.address == address for each in held):
                return name
    return "lo"


def take_listener() -> int:
    """The descriptor of the socket that rank 0 listens with: inherited, else bound to the
    address and port of the environment. Whoever gets it closes it. Raises `OSError`."""
    # It is used once: a process that this rank starts has another descriptor of that number.
    inherited = os.environ.pop(LISTENER, None)
    if inherited is not None:
        return int(inherited)
    with socket.socket() as made:
        made.bind((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        return made.detach()
