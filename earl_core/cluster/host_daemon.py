"""Daemon that starts ranks on another host and carries their bytes, for a controller elsewhere.

How its methods are called from afar is not its business: `ray_cluster` makes an actor of it.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from earl_core.cluster.fork_server import fork_server
from earl_core.cluster.host import Launch, LocalHost, LocalRank
from earl_core.cluster.streams import Piece, Streams
from earl_core.system.errors import ConfigError
from earl_core.system.files import device_of
from earl_core.system.hardware import read_resources
from earl_core.system.import_path import load_object
from earl_core.system.processes import boot_id

logger = logging.getLogger(__name__)

SILENT_SECONDS = 25.0
"""A controller that does not ask for so long is lost."""
UNANSWERED_SECONDS = 15.0
"""A host that does not answer for so long is lost, whatever Ray still thinks of it."""
ANSWER_SECONDS = 300.0
"""Time limit of calls that start a rank: the host may be importing torch."""
STREAMS = ("control", "channel")


class HostDaemon:
    """address: of this host, where its ranks listen. cpus: cores of it that the run may use.
    Several threads may call it; `received` and `send` are called by one each."""

    def __init__(self, address: str, cpus: int) -> None:
        found = read_resources()
        own = replace(found, cores=found.cores[:cpus])
        self._host = LocalHost(address=address, resources=own)
        self._kept: dict[str, Any] = {}
        self._ranks: dict[int, LocalRank] = {}
        self._numbers = itertools.count()
        self._streams = Streams()
        self._early: dict[int, list[Piece]] = {}
        self._sent = 0
        self._asked = time.monotonic()
        threading.Thread(
            target=self._wait_for_silence, name="earl-daemon-silence", daemon=True
        ).start()

    def facts(self, directory: str, started_in: str) -> dict[str, Any]:
        """Name, address, resources, and what tells the memory around `directory` from that of other
        hosts. From now on paths are as the controller, started in that directory, writes them.

        Raises `ConfigError` when this host does not see it.
        """
        host = self._host
        try:
            os.chdir(started_in)
        except OSError as error:
            raise ConfigError(
                f"host {host.name} does not see {started_in}, where the run was started "
                f"({error.strerror}): use a file system that all hosts share"
            ) from error
        return {
            "name": host.name,
            "address": host.address,
            "resources": asdict(host.resources),
            "memory": memory_of(directory),
        }

    def ping(self) -> None:
        """Answer; the controller lives."""
        self._asked = time.monotonic()

    def _wait_for_silence(self) -> None:
        """A controller that cannot be reached has given this host up: end all ranks."""
        looked = time.monotonic()
        while looked - self._asked < SILENT_SECONDS:
            time.sleep(1.0)
            if time.monotonic() - looked > SILENT_SECONDS / 2:
                # It was this process that stood still.
                self._asked = time.monotonic()
            looked = time.monotonic()
        logger.error("the controller has been silent for %.0f s: all ranks end", SILENT_SECONDS)
        os._exit(1)

    def rename(self, name: str) -> None:
        """Another name, should another host have the same."""
        self._host.name = name

    def preload(self, modules: Sequence[str]) -> None:
        """Have this host's fork server import the modules, as `Host` wants."""
        fork_server().preload(*modules)

    def keep(self, target: str, arguments: Sequence[Any]) -> None:
        """Build the target in this process and keep it under its name, as `Host` wants."""
        self._kept[target] = load_object(target)(*arguments)

    def use(self, target: str, method: str, arguments: Sequence[Any]) -> Any:
        """Call a method of what is kept here."""
        return getattr(self._kept[target], method)(*arguments)

    def start(self, launch: Sequence[Any]) -> tuple[int, tuple[str, int]]:
        """Start a rank; its number here, and where rank 0 listens. Raises `OSError`."""
        module, log, environment, meeting = launch
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        rank = self._host.start(Launch(module, Path(log), environment, meeting))
        number = next(self._numbers)
        self._ranks[number] = rank
        self._streams.add(number, {name: getattr(rank, name) for name in STREAMS})
        return number, rank.meeting

    def received(self) -> Iterator[list[Piece]]:
        """Yield the bytes that the ranks and their supervisors send, until this process ends."""
        while True:
            if pieces := self._streams.collect():
                yield pieces

    def send(self, number: int, pieces: list[Piece]) -> None:
        """Pass bytes on in the order of the numbers, from 0: of two calls the one with less to
        carry may come first."""
        self._early[number] = pieces
        while (following := self._early.pop(self._sent, None)) is not None:
            self._sent += 1
            self._streams.deliver(following)

    def kill(self, number: int) -> None:
        """Kill the supervisor of a rank, as `RankProcess` does."""
        self._ranks[number].kill()

    def end(self, number: int, pid: int | None) -> None:
        """End a rank and all that it started, as `RankProcess` does."""
        self._ranks[number].end(pid)

    def lost(self, number: int) -> str:
        """Return the reason why a rank's connection closed, as `RankProcess` does."""
        return self._ranks[number].lost()

    def close(self, number: int) -> None:
        """Close a rank's streams and sockets, and forget it."""
        self._streams.remove(number)
        self._ranks.pop(number).close()

    def log_bytes(self, path: str) -> int:
        """Present size of a file, 0 without one."""
        with suppress(OSError):
            return Path(path).stat().st_size
        return 0


class RemoteRank:
    """A rank that a daemon has started; see `RankProcess`.

    ask: calls a method of the daemon; raises `ConnectionError` when its host is lost. forget: told
    that the rank is closed. `ends` are the far ends of the two sockets, for whoever carries bytes.
    """

    def __init__(
        self,
        ask: Callable[..., Any],
        forget: Callable[[int], None],
        number: int,
        meeting: tuple[str, int],
    ) -> None:
        self._ask, self._forget, self._number = ask, forget, number
        self.meeting = (meeting[0], meeting[1])
        self.control, control = socket.socketpair()
        self.channel, channel = socket.socketpair()
        self.ends = {"control": control, "channel": channel}

    def lost(self) -> str:
        """Ask the daemon why the connection closed; a host that is lost is the reason itself."""
        try:
            return str(self._ask("lost", self._number, seconds=UNANSWERED_SECONDS))
        except ConnectionError as error:
            return str(error)

    def kill(self) -> None:
        """Have the daemon kill the supervisor; a lost host needs none."""
        with suppress(ConnectionError):
            self._ask("kill", self._number, seconds=UNANSWERED_SECONDS)

    def end(self, pid: int | None) -> None:
        """Have the daemon end the rank. The ranks of a lost host end with their daemon."""
        with suppress(ConnectionError):
            self._ask("end", self._number, pid)

    def close(self) -> None:
        """Close both ends here, and the rank's at the daemon."""
        self.control.close()
        self.channel.close()
        with suppress(ConnectionError):
            self._ask("close", self._number, seconds=UNANSWERED_SECONDS)
        self._forget(self._number)


def memory_of(directory: str) -> str:
    """Equal for processes that see the same file system there, on one boot of one machine."""
    return f"{boot_id()} {device_of(Path(directory))}"
