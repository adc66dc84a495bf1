"""Ranges of shards from other hosts, over TCP.

A thread for each host reads straight into the final memory. When many hosts send to one, their
packets overflow the queue of its link and TCP waits 200 ms before it tries again (incast). So the
bytes asked for and not yet received are bounded over all hosts together, and every consumer starts
with another producer.
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass

from earl_core.dispatch.remote.connection import Connection, Question, cut
from earl_core.dispatch.remote.transport import RemoteRead, TransportError
from earl_core.dispatch.shards.shard import Proof
from earl_core.system.processes import host_name

_transports: weakref.WeakSet[TcpTransport] = weakref.WeakSet()


@dataclass(frozen=True)
class ClientLimits:
    """Sizes of the pieces of a read, and limits on its time.

    bytes_in_flight: asked for and not yet received, over all hosts of a read.
    stall_seconds: how long a host that owes bytes may send none. A whole read of n bytes has to
    end within stall_seconds + n / minimum_rate (bytes/s), however steadily its bytes trickle.
    """

    request_bytes: int = 512 * 2**10
    bytes_in_flight: int = 2 * 2**20
    requests_per_host: int = 2
    connect_seconds: float = 5.0
    stall_seconds: float = 30.0
    minimum_rate: float = 2**20

    def __post_init__(self) -> None:
        if not 0 < self.request_bytes <= self.bytes_in_flight or self.requests_per_host < 1:
            raise ValueError("a client needs 0 < request_bytes <= bytes_in_flight")


class TcpTransport:
    """Reads from the range servers at `addresses` (host name → IP address, port).

    Connections stay open between reads. Several threads may read at a time, each over connections
    of its own; a forked or spawned process opens its own too. received_bytes: of all reads that
    ended well; whoever counts may set it.
    """

    def __init__(
        self,
        addresses: Mapping[str, tuple[str, int]],
        token: str,
        limits: ClientLimits | None = None,
    ) -> None:
        self.addresses = dict(addresses)
        self.limits = limits or ClientLimits()
        self.received_bytes = 0
        self._token = token
        self.reset()
        _transports.add(self)

    def __reduce__(self) -> tuple[type[TcpTransport], tuple[object, ...]]:
        return type(self), (self.addresses, self._token, self.limits)

    def reset(self) -> None:
        """Forget all connections without closing them."""
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._all: weakref.WeakSet[Connection] = weakref.WeakSet()

    def close(self) -> None:
        """Close idle connections. Reading again opens new ones."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def read_all(self, reads: Mapping[str, RemoteRead], proofs: Mapping[str, Proof]) -> None:
        """Fill from several hosts at the same time. proofs: by file name. Raises `TransportError`;
        the destinations' contents are then undefined."""
        limits = self.limits
        work = {host: cut(reads[host], proofs, limits.request_bytes) for host in rotated(reads)}
        total = sum(question.size for questions in work.values() for question in questions)
        deadline = time.monotonic() + limits.stall_seconds + total / limits.minimum_rate
        slots = _Slots(limits.bytes_in_flight // limits.request_bytes)
        stop = threading.Event()
        with ThreadPoolExecutor(max(1, len(work)), "earl-reads") as threads:
            jobs = [
                threads.submit(self._read, host, questions, slots, stop, deadline)
                for host, questions in work.items()
                if questions
            ]
            try:
                wait(jobs, return_when=FIRST_EXCEPTION)
            finally:
                stop.set()
        try:
            while jobs:
                jobs.pop(0).result()
            with self._lock:
                self.received_bytes += total
        finally:
            jobs.clear()  # else an error would hold itself, and views of shards, by its traceback

    def _read(
        self,
        host: str,
        questions: deque[Question],
        slots: _Slots,
        stop: threading.Event,
        deadline: float,
    ) -> None:
        """One host's part of a read."""
        connection = self._checkout(host, deadline)
        try:
            while (questions or connection.asked) and not stop.is_set():
                # Whoever is owed an answer receives it before it waits for another slot.
                patience = 0.0 if connection.asked else max(0.0, deadline - time.monotonic())
                room = len(connection.asked) < self.limits.requests_per_host
                turn = len(connection.asked), -len(questions)
                if questions and room and slots.acquire(turn, patience):
                    connection.ask(questions.popleft(), deadline)
                elif connection.asked:
                    connection.take_answer(deadline)
                    slots.release()
                else:
                    raise TransportError(f"host {host!r} was not asked in time: others are slow")
        finally:
            if connection.asked:
                connection.close()  # it is out of step
                slots.release(len(connection.asked))
            else:
                with self._lock:
                    self._idle.append(connection)

    def _checkout(self, host: str, deadline: float) -> Connection:
        """A kept connection, unless it ended while idle, or a new one."""
        address = self.addresses.get(host)
        if address is None:
            raise TransportError(f"no address is known of host {host!r}: it serves no shards")
        with self._lock:
            kept = next((one for one in self._idle if one.host == host), None)
            if kept is not None:
                self._idle.remove(kept)
        if kept is not None:
            if kept.is_alive():
                return kept
            kept.close()
        soon = min(deadline, time.monotonic() + self.limits.connect_seconds)
        pause = 0.005
        while True:
            try:
                made = Connection(host, address, self._token, soon, self.limits.stall_seconds)
            except TransportError as error:
                if not error.payload.get("full") or time.monotonic() + pause > soon:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, 0.2)
                continue
            self._all.add(made)
            return made


class _Slots:
    """Slots for requests in flight, of all hosts of a read together.

    A free one goes to the host that has fewest requests in flight, then to the one that has most
    left to ask for: so that as many hosts as possible send at a time, and all end together.
    """

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._free = count
        self._waiting: list[tuple[tuple[int, int], int, threading.Event]] = []
        self._numbers = itertools.count()

    def acquire(self, turn: tuple[int, int], patience: float) -> bool:
        """Take a slot; true if one is free within so many seconds. The least turn is next."""
        with self._lock:
            if self._free and (not self._waiting or turn < self._waiting[0][0]):
                self._free -= 1
                return True
            if not patience:
                return False
            given = threading.Event()
            heapq.heappush(self._waiting, waiting := (turn, next(self._numbers), given))
        if given.wait(patience):
            return True
        with self._lock:
            if given.is_set():
                return True
            self._waiting.remove(waiting)
            heapq.heapify(self._waiting)
            return False

    def release(self, count: int = 1) -> None:
        """Give slots back."""
        with self._lock:
            self._free += count
            while self._free and self._waiting:
                self._free -= 1
                heapq.heappop(self._waiting)[2].set()


def rotated(hosts: Mapping[str, RemoteRead]) -> list[str]:
    """Hosts in order of their names, from the one after this host's name on."""
    names = sorted(hosts)
    mine = host_name()
    after = [name for name in names if name > mine]
    return after + [name for name in names if name <= mine]


def _forget_in_child() -> None:
    """A forked child holds copies of the sockets; closing them here leaves the parent's alone."""
    for transport in list(_transports):
        for connection in list(transport._all):
            connection.forget()
        transport.reset()


os.register_at_fork(after_in_child=_forget_in_child)
