"""Serves byte ranges of one run's sealed shards to other hosts: checked, then lent and sent.

A thread per connection: each spends its time in the kernel, sending slices of the mapping. Every
wait has a deadline, every size a limit, and nothing that comes over the wire can end the server.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from earl_core.dispatch.remote import protocol
from earl_core.dispatch.remote.protocol import drain, receive, send_all, tune
from earl_core.dispatch.remote.transport import FILE_NAME, Range, TransportError, proof_for
from earl_core.dispatch.segments.leases import Mapped, ShardMismatch, map_shared
from earl_core.dispatch.shards.manifest import ManifestError
from earl_core.dispatch.shards.shard import Proof, verify_blocks
from earl_core.system.frames import WireError
from earl_core.system.processes import host_name

_log = logging.getLogger(__name__)
_servers: weakref.WeakSet[RangeServer] = weakref.WeakSet()


@dataclass(frozen=True)
class ServerLimits:
    """Limits on a client's requests and on the time they take.

    max_strangers: connections that have not shown yet that they know the token; one more takes the
    place of the oldest from the address that has most. handshake_seconds: from connect to welcome.
    idle_seconds: without a request. request_seconds: for the bytes of one request to come.
    send_seconds: for one answer to be taken.
    """

    max_request_bytes: int = 4 * 2**20
    max_ranges: int = protocol.MAX_RANGES
    max_connections: int = 256
    max_strangers: int = 64
    handshake_seconds: float = 5.0
    idle_seconds: float = 3600.0
    request_seconds: float = 10.0
    send_seconds: float = 60.0


class RangeServer:
    """Serves the shards in `directory` to who knows `token`. A context manager. Raises `ValueError`
    for an empty token, `OSError` when it cannot listen."""

    def __init__(
        self,
        directory: Path,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: ServerLimits | None = None,
    ) -> None:
        check_token(token, "the range server")
        self.directory = Path(directory)
        self.limits = limits or ServerLimits()
        self._token = token
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._strangers: dict[socket.socket, str] = {}
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=256)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._acceptor = threading.Thread(target=self._accept, name="earl-ranges", daemon=True)
        _servers.add(self)
        self._acceptor.start()

    def __enter__(self) -> RangeServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, break connections off, and wait for their threads."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            threads = dict(self._open)
        # Shutting down reaches the thread in accept() and copies that forked children hold.
        for used in (self._listener, *threads):
            with contextlib.suppress(OSError):
                used.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in (self._acceptor, *threads.values()):
            if thread is not threading.current_thread():
                thread.join(5.0)

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, address = self._listener.accept()
            except OSError as error:
                if self._closed or self._listener.fileno() < 0:
                    return
                # Out of descriptors or a connection that is gone already: others still count.
                _log.warning("a connection could not be accepted: %s", error)
                time.sleep(0.05)
                continue
            with self._lock:
                if self._closed:
                    client.close()
                    continue
                self._make_room()
                self._strangers[client] = str(address[0])
                thread = threading.Thread(
                    target=self._serve, args=(client,), name="earl-ranges-client", daemon=True
                )
                self._open[client] = thread
            thread.start()

    def _make_room(self) -> None:
        """Make room for one more stranger: those who keep silent must not keep others out."""
        if len(self._strangers) < self.limits.max_strangers:
            return
        ((most, _),) = Counter(self._strangers.values()).most_common(1)
        oldest = next(each for each, address in self._strangers.items() if address == most)
        del self._strangers[oldest]
        with contextlib.suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)

    def _admit(self, client: socket.socket) -> bool:
        """Admit a client that knows the token; false when there is no room for one more."""
        with self._lock:
            known = len(self._open) - len(self._strangers)
            if client not in self._strangers or known >= self.limits.max_connections:
                return False
            del self._strangers[client]
            return True

    def _serve(self, client: socket.socket) -> None:
        try:
            tune(client)
            if self._welcome(client):
                while self._answer(client):
                    pass
        except (OSError, WireError) as error:
            _log.debug("a connection ended: %s", error)
        except Exception:
            _log.exception("a connection ended by a fault of the range server")
        finally:
            with self._lock:
                self._open.pop(client, None)
                self._strangers.pop(client, None)
            client.close()

    def _welcome(self, client: socket.socket) -> bool:
        deadline = time.monotonic() + self.limits.handshake_seconds
        nonce = secrets.token_bytes(protocol.NONCE_BYTES)
        send_all(client, [protocol.HELLO.pack(protocol.MAGIC, nonce)], deadline)
        answer = bytearray(protocol.ANSWER.size)
        if not receive(client, [answer], deadline):
            return False
        magic, theirs, proof = protocol.ANSWER.unpack(answer)
        expected = protocol.prove(self._token, b"client", nonce, theirs)
        good = protocol.same(proof, expected) and magic == protocol.MAGIC
        if good and not self._admit(client):
            return False
        status = protocol.Status.OK if good else protocol.Status.FAILED
        mine = (
            protocol.prove(self._token, b"server", nonce, theirs) if good else bytes(len(expected))
        )
        send_all(client, [protocol.WELCOME.pack(protocol.MAGIC, status, mine)], deadline)
        return good

    def _answer(self, client: socket.socket) -> bool:
        """Read one request and answer it; False when the connection is to end."""
        head = bytearray(protocol.REQUEST.size)
        first = memoryview(head)[:1]
        if not receive(client, [first], time.monotonic() + self.limits.idle_seconds):
            return False
        deadline = time.monotonic() + self.limits.request_seconds
        if not receive(client, [memoryview(head)[1:]], deadline):
            return False
        number, size, ranges = protocol.read_request_head(head)
        if size > protocol.MAX_BODY or ranges > self.limits.max_ranges:
            refusal = TransportError(
                f"a request of {ranges} ranges ({size} bytes) is too large: at most "
                f"{self.limits.max_ranges} ranges in {protocol.MAX_FILES} files are answered"
            )
            send_all(client, [protocol.pack_failure(number, refusal)], deadline)
            drain(client, size)
            return False
        body = bytearray(size)
        if not receive(client, [body], deadline):
            return False
        request = protocol.read_request(number, body, ranges)
        self._send(client, request)
        return True

    def _send(self, client: socket.socket, request: protocol.Request) -> None:
        deadline = time.monotonic() + self.limits.send_seconds
        try:
            if request.total_bytes > self.limits.max_request_bytes:
                raise TransportError(
                    f"a request for {request.total_bytes:,} bytes is too large: at most "
                    f"{self.limits.max_request_bytes:,} are answered at a time"
                )
            with leased_views(self.directory, request.ranges, request.proofs) as views:
                digest = xxhash.xxh3_64()
                for view in views:
                    digest.update(view)
                size, checksum = request.total_bytes, digest.intdigest()
                head = protocol.pack_response(request.number, protocol.Status.OK, size, checksum)
                send_all(client, [head, *views], deadline)
        except TransportError as error:
            send_all(client, [protocol.pack_failure(request.number, error)], deadline)
        except OSError as error:
            if not isinstance(error, TimeoutError | ConnectionError):
                _log.warning("a request could not be answered: %s", error)
            raise


_MIN_BLOCK = 4096


@contextmanager
def leased_views(
    directory: Path, ranges: Sequence[Range], proofs: Mapping[str, Proof]
) -> Iterator[list[memoryview]]:
    """The bytes of each range as a read-only view, under leases, checked.

    Raises `TransportError` for names and ranges that no manifest could hold, for shards that are
    not there in this generation, and for blocks that do not match the block table.
    """
    leases: dict[str, Mapped] = {}
    views: list[memoryview] = []
    try:
        for item in ranges:
            proof = proof_for(item, proofs)
            if item.file not in leases:
                _check_proof(proof)
                leases[item.file] = _lease(directory, proof)
            _check_range(item, proof)
        for file, mapped in leases.items():
            _verify(mapped, proofs[file], [item for item in ranges if item.file == file])
        for item in ranges:
            views.append(leases[item.file].memory[item.start : item.start + item.length])
        yield views
    finally:
        for view in views:
            view.release()
        for mapped in leases.values():
            # The traceback of an error keeps views alive: the lease goes with the last of them.
            with contextlib.suppress(BufferError):
                mapped.close()


def _verify(mapped: Mapped, proof: Proof, ranges: Sequence[Range]) -> None:
    """Check the blocks that the ranges of one file touch, each once."""
    try:
        verify_blocks(mapped.memory, proof, [(item.start, item.length) for item in ranges])
    except ManifestError as error:
        raise TransportError(
            f"{error}: the memory of host {host_name()!r} is damaged, or the manifest is not this "
            "shard's; resume the run, which computes the shard again"
        ) from error


def _check_proof(proof: Proof) -> None:
    match = FILE_NAME.fullmatch(proof.file)
    if match is None:
        raise TransportError(f"{proof.file!r} is not the name of a sealed shard")
    if int(match[1]) != proof.generation:
        raise TransportError(f"{proof.file} is not of generation {proof.generation}")
    inside = all(
        start >= 0 and size >= 0 and start + size <= proof.bytes
        for start, size in (proof.body, proof.checksums)
    )
    blocks = -(-proof.body[1] // max(proof.block_bytes, _MIN_BLOCK))
    if not inside or proof.block_bytes < _MIN_BLOCK or proof.checksums[1] != 8 * (1 + blocks):
        raise TransportError(f"the description of {proof.file} contradicts itself")


def _check_range(item: Range, proof: Proof) -> None:
    begin, size = proof.body
    if item.length <= 0 or item.start < begin or item.start + item.length > begin + size:
        raise TransportError(
            f"bytes {item.start} to {item.start + item.length} lie outside of the data of "
            f"{item.file}, which is bytes {begin} to {begin + size}"
        )


def _lease(directory: Path, proof: Proof) -> Mapped:
    try:
        return map_shared(directory / proof.file, proof.bytes)
    except (FileNotFoundError, ShardMismatch) as error:
        raise TransportError(
            f"the shard {proof.file} is not on host {host_name()!r}: it was released or never "
            "written; resume the run, which computes it again"
        ) from error


def check_token(token: str, what: str) -> None:
    """Raise `ValueError` for an empty token: other users of this machine reach loopback too."""
    if not token:
        raise ValueError(f"{what} would answer everyone: give it a token, a long random word")


def _forget_in_child() -> None:
    """A forked child holds copies of the sockets; closing them here leaves the parent's alone."""
    for server in list(_servers):
        for used in (server._listener, *server._open):
            with contextlib.suppress(OSError):
                os.close(used.detach())
        server._closed = True
    _servers.clear()


os.register_at_fork(after_in_child=_forget_in_child)
