"""Ranges of shards from other hosts, over TCP.

One thread reads from all hosts at the same time, straight into the final memory. When many hosts
send to one, their packets overflow the queue of its link and TCP waits 200 ms before it tries
again (incast). So the bytes asked for and not yet received are bounded over all hosts together,
and every consumer starts with another producer.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

from earl_core.dispatch.remote import protocol
from earl_core.dispatch.remote.peer import Peer, cut
from earl_core.dispatch.remote.sockets import receive, remaining, send_all, tune
from earl_core.dispatch.remote.transport import RemoteRead, TransportError
from earl_core.dispatch.shards.checksums import Proof
from earl_core.system.frames import WireError
from earl_core.system.process_identity import host_name

_transports: weakref.WeakSet[TcpTransport] = weakref.WeakSet()


@dataclass(frozen=True)
class ClientLimits:
    """How a read is cut up, and how long it may take.

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
    of its own; a forked or spawned process opens its own too.
    """

    def __init__(
        self,
        addresses: Mapping[str, tuple[str, int]],
        token: str,
        limits: ClientLimits | None = None,
    ) -> None:
        self.addresses = dict(addresses)
        self.limits = limits or ClientLimits()
        self._token = token
        self.reset()
        _transports.add(self)

    def __reduce__(self) -> tuple[type[TcpTransport], tuple[object, ...]]:
        return type(self), (self.addresses, self._token, self.limits)

    def reset(self) -> None:
        """Forget all connections without closing them."""
        self._lock = threading.Lock()
        self._idle: dict[str, list[socket.socket]] = {}
        self._all: set[socket.socket] = set()

    def close(self) -> None:
        """Close idle connections. Reading again opens new ones."""
        with self._lock:
            idle = [used for found in self._idle.values() for used in found]
            self._idle.clear()
        for used in idle:
            self._discard(used)

    def read_all(self, reads: Mapping[str, RemoteRead], proofs: Mapping[str, Proof]) -> None:
        """Fill from several hosts at the same time. proofs: by file name.

        Raises `TransportError`; the destinations' contents are then undefined.
        """
        peers = []
        for host in rotated(reads):
            queue = cut(reads[host], proofs, self.limits.request_bytes)
            if queue:
                peers.append(Peer(host, queue))
        total = sum(peer.left for peer in peers)
        deadline = time.monotonic() + self.limits.stall_seconds + total / self.limits.minimum_rate
        selector = selectors.DefaultSelector()
        try:
            self._run(peers, selector, deadline)
        finally:
            selector.close()
            for peer in peers:
                # A connection that still owes an answer is out of step.
                if peer.connection is not None and (peer.in_flight or peer.broken):
                    self._discard(peer.connection)
                elif peer.connection is not None:
                    self._give_back(peer.host, peer.connection)

    def _run(self, peers: list[Peer], selector: selectors.BaseSelector, deadline: float) -> None:
        while any(peer.left for peer in peers):
            self._ask(peers, selector, deadline)
            wait = min(
                deadline, *(p.last + self.limits.stall_seconds for p in peers if p.in_flight)
            )
            events = selector.select(max(0.0, wait - time.monotonic()))
            if not events and time.monotonic() >= wait:
                raise self._timed_out(peers)
            for key, _ in events:
                self._take(key.data, selector, deadline)
            if time.monotonic() > deadline:
                raise self._timed_out(peers)

    def _ask(self, peers: list[Peer], selector: selectors.BaseSelector, deadline: float) -> None:
        """Ask while the bounds allow: who has fewest questions open, then who has most left."""
        flying = sum(peer.bytes_in_flight for peer in peers)
        while True:
            able = [
                peer
                for peer in peers
                if peer.queue and len(peer.in_flight) < self.limits.requests_per_host
            ]
            if not able:
                return
            # Of equals the first in rotated order: min() keeps it.
            peer = min(able, key=lambda one: (len(one.in_flight), -one.left))
            size = peer.queue[0].size
            if flying and flying + size > self.limits.bytes_in_flight:
                return
            flying += size
            if peer.connection is None:
                peer.connection, peer.reused = self._checkout(peer.host, deadline)
                selector.register(peer.connection, selectors.EVENT_READ, peer)
            try:
                peer.ask(deadline)
            except OSError as error:
                self._again(peer, selector, deadline, error)

    def _take(self, peer: Peer, selector: selectors.BaseSelector, deadline: float) -> None:
        try:
            peer.take()
        except WireError as error:
            peer.broken = True
            raise TransportError(
                f"host {peer.host!r} does not speak this protocol: {error}"
            ) from error
        except OSError as error:
            self._again(peer, selector, deadline, error)

    def _again(
        self, peer: Peer, selector: selectors.BaseSelector, deadline: float, error: OSError
    ) -> None:
        """A kept connection may have ended while idle: then, and only then, try a new one."""
        assert peer.connection is not None
        selector.unregister(peer.connection)
        self._discard(peer.connection)
        peer.connection = None
        if isinstance(error, TimeoutError):
            raise self._timed_out([peer]) from error
        if not peer.reused:
            raise TransportError(
                f"the connection to host {peer.host!r} broke off ({error}): see whether its "
                "process still runs"
            ) from error
        peer.rewind()
        peer.connection, peer.reused = self._connect(peer.host, deadline), False
        selector.register(peer.connection, selectors.EVENT_READ, peer)

    def _timed_out(self, peers: list[Peer]) -> TransportError:
        late = {peer.host: peer.left for peer in peers if peer.left}
        for peer in peers:
            peer.broken = peer.broken or bool(peer.in_flight)
        return TransportError(
            f"{sum(late.values()):,} bytes of {', '.join(map(repr, late))} did not come in time: "
            "see whether these hosts are alive and their network is not overloaded"
        )

    def _checkout(self, host: str, deadline: float) -> tuple[socket.socket, bool]:
        with self._lock:
            idle = self._idle.get(host)
            if idle:
                return idle.pop(), True
        return self._connect(host, deadline), False

    def _connect(self, host: str, deadline: float) -> socket.socket:
        address = self.addresses.get(host)
        if address is None:
            raise TransportError(f"no address is known of host {host!r}: it serves no shards")
        deadline = min(deadline, time.monotonic() + self.limits.connect_seconds)
        try:
            connection = socket.create_connection(address, timeout=remaining(deadline))
        except TimeoutError as error:
            raise TransportError(f"host {host!r} at {address} did not answer in time") from error
        except OSError as error:
            raise TransportError(
                f"host {host!r} at {address} cannot be reached: {error}"
            ) from error
        self._all.add(connection)
        try:
            tune(connection)
            self._shake_hands(connection, host, deadline)
            connection.setblocking(False)
        except TransportError:
            self._discard(connection)
            raise
        except TimeoutError as error:
            self._discard(connection)
            raise TransportError(f"host {host!r} at {address} did not greet in time") from error
        except OSError as error:
            self._discard(connection)
            raise TransportError(f"host {host!r} at {address} broke off: {error}") from error
        return connection

    def _shake_hands(self, connection: socket.socket, host: str, deadline: float) -> None:
        hello, welcome = (
            bytearray(protocol.HELLO.size),
            bytearray(protocol.WELCOME.size),
        )
        if not receive(connection, hello, deadline):
            raise TransportError(f"host {host!r} closed the connection at once: it may be full")
        magic, theirs = protocol.HELLO.unpack(hello)
        if magic != protocol.MAGIC:
            raise TransportError(
                f"what listens on host {host!r} is no range server of this version"
            )
        mine = secrets.token_bytes(protocol.NONCE_BYTES)
        proof = protocol.prove(self._token, b"client", theirs, mine)
        send_all(connection, [protocol.ANSWER.pack(protocol.MAGIC, mine, proof)], deadline)
        if not receive(connection, welcome, deadline):
            raise TransportError(f"host {host!r} broke the handshake off")
        _, status, shown = protocol.WELCOME.unpack(welcome)
        if status != protocol.Status.OK:
            raise TransportError(
                f"host {host!r} does not accept the token: all hosts need the same one"
            )
        if not protocol.same(shown, protocol.prove(self._token, b"server", theirs, mine)):
            raise TransportError(
                f"what answers for host {host!r} does not know the token; not trusted"
            )

    def _give_back(self, host: str, connection: socket.socket) -> None:
        with self._lock:
            self._idle.setdefault(host, []).append(connection)

    def _discard(self, connection: socket.socket) -> None:
        self._all.discard(connection)
        # Shutting down ends it even where a forked child still holds a copy.
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()


def rotated(hosts: Mapping[str, RemoteRead]) -> list[str]:
    """Hosts in order of their names, from the one after this host's name on."""
    names = sorted(hosts)
    mine = host_name()
    after = [name for name in names if name > mine]
    return after + [name for name in names if name <= mine]


def _forget_in_child() -> None:
    """A forked child holds copies of the sockets; closing them here leaves the parent's alone."""
    for transport in list(_transports):
        for used in transport._all:
            with contextlib.suppress(OSError):
                os.close(used.detach())
        transport.reset()


os.register_at_fork(after_in_child=_forget_in_child)
