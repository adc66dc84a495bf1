"""The range server against clients that are hostile, broken, slow or dead."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earl_core.dispatch import ShardEntry, ShardStore
from earl_core.dispatch.remote import Proof, TransportError, protocol
from earl_core.dispatch.remote.range_server import RangeServer, ServerLimits
from earl_core.dispatch.remote.tcp import ClientLimits, TcpTransport
from earl_core.dispatch.remote.transport import Range, RemoteRead
from tests.dispatch.hosts import TOKEN, destination, file_bytes, make_shard, whole

SMALL = ServerLimits(
    max_request_bytes=2**20, max_ranges=16, max_connections=4, handshake_seconds=2.0
)
HASTY = replace(
    SMALL, handshake_seconds=0.4, idle_seconds=0.6, request_seconds=0.4, send_seconds=0.5
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShardStore]:
    made = ShardStore(tmp_path_factory.mktemp("server") / "run", 2**28)
    yield made
    made.remove()


@pytest.fixture(scope="module")
def entry(store: ShardStore) -> ShardEntry:
    return make_shard(store, [3_000_000, 5])


@pytest.fixture
def server(store: ShardStore) -> Iterator[RangeServer]:
    with RangeServer(store.directory, TOKEN, limits=SMALL) as made:
        yield made


@pytest.fixture
def hasty(store: ShardStore) -> Iterator[RangeServer]:
    with RangeServer(store.directory, TOKEN, limits=HASTY) as made:
        yield made


def connect(server: RangeServer, token: str | None = TOKEN) -> socket.socket:
    """A connection after its handshake."""
    client = socket.create_connection(server.address, timeout=10)
    _, theirs = protocol.HELLO.unpack(client.recv(protocol.HELLO.size, socket.MSG_WAITALL))
    mine = os.urandom(protocol.NONCE_BYTES)
    proof = protocol.prove(token, b"client", theirs, mine)
    client.sendall(protocol.ANSWER.pack(protocol.MAGIC, mine, proof))
    status = protocol.WELCOME.unpack(client.recv(protocol.WELCOME.size, socket.MSG_WAITALL))[1]
    assert status == (protocol.Status.OK if token == TOKEN else protocol.Status.FAILED)
    return client


def answer(client: socket.socket) -> tuple[int, protocol.Status, bytes]:
    head = client.recv(protocol.RESPONSE.size, socket.MSG_WAITALL)
    number, status, size, _ = protocol.read_response(head)
    payload = bytearray()
    while len(payload) < size:
        more = client.recv(size - len(payload))
        assert more, "the answer is cut off"
        payload += more
    return number, status, bytes(payload)


def ended(client: socket.socket) -> bool:
    """Whether the server closed this connection, within ten seconds."""
    client.settimeout(60)
    with contextlib.suppress(ConnectionError):
        while client.recv(65536):
            pass
    return True


def serves(server: RangeServer, store: ShardStore, entry: ShardEntry) -> bool:
    """Whether a well-behaved client is answered."""
    transport = TcpTransport({"a": server.address}, TOKEN)
    item = whole(entry, "reward")
    into = destination(item)
    transport.read_all({"a": RemoteRead([item], into)}, {entry.file: Proof.of(entry)})
    transport.close()
    return bytes(into[0]) == file_bytes(store, item)


def test_it_answers_nobody_without_a_token(store: ShardStore, entry: ShardEntry) -> None:
    for host in ("127.0.0.1", "0.0.0.0"):
        with pytest.raises(ValueError, match="give it a token"):
            RangeServer(store.directory, token="", host=host)
    item = whole(entry, "reward")
    with RangeServer(store.directory, TOKEN) as server:
        for token in ("", "some token"):
            with pytest.raises(TransportError, match="does not accept the token"):
                TcpTransport({"a": server.address}, token).read_all(
                    {"a": RemoteRead([item], destination(item))}, {entry.file: Proof.of(entry)}
                )


def test_the_token_never_travels(server: RangeServer) -> None:
    client = socket.create_connection(server.address, timeout=10)
    hello = client.recv(protocol.HELLO.size, socket.MSG_WAITALL)
    first = protocol.prove(TOKEN, b"client", protocol.HELLO.unpack(hello)[1], bytes(32))
    assert TOKEN.encode() not in first
    with socket.create_connection(server.address, timeout=10) as other:
        # A recorded answer does not fit to another greeting.
        other.recv(protocol.HELLO.size, socket.MSG_WAITALL)
        other.sendall(protocol.ANSWER.pack(protocol.MAGIC, bytes(32), first))
        welcome = other.recv(protocol.WELCOME.size, socket.MSG_WAITALL)
        assert protocol.WELCOME.unpack(welcome)[1] == protocol.Status.FAILED
        assert ended(other)
    client.close()


def test_requests_that_are_too_large_are_refused(
    server: RangeServer, store: ShardStore, entry: ShardEntry
) -> None:
    client = connect(server)
    start, _ = entry.columns["tokens"].values
    proof = Proof.of(entry)
    big = Range(entry.file, entry.generation, start, SMALL.max_request_bytes + 1)
    client.sendall(protocol.pack_request(7, [proof], [big]))
    number, status, message = answer(client)
    assert (number, status) == (7, protocol.Status.FAILED)
    assert b"too large" in message
    fits = big._replace(length=100)
    client.sendall(protocol.pack_request(8, [proof], [fits]))
    assert answer(client) == (8, protocol.Status.OK, file_bytes(store, fits)), "still in step"
    client.sendall(protocol.pack_request(9, [proof], [fits] * (SMALL.max_ranges + 1)))
    number, status, message = answer(client)
    assert (number, status) == (9, protocol.Status.FAILED)
    assert b"ranges" in message
    assert ended(client)
    assert serves(server, store, entry)


def test_a_client_that_asks_for_more_than_the_server_gives(
    server: RangeServer, entry: ShardEntry
) -> None:
    limits = ClientLimits(request_bytes=2**22, bytes_in_flight=2**22)
    item = whole(entry)
    with pytest.raises(TransportError, match="too large"):
        TcpTransport({"a": server.address}, TOKEN, limits).read_all(
            {"a": RemoteRead([item], destination(item))}, {entry.file: Proof.of(entry)}
        )


def test_a_head_that_promises_gigabytes_is_refused_unread(
    server: RangeServer, store: ShardStore, entry: ShardEntry
) -> None:
    client = connect(server)
    client.sendall(protocol.REQUEST.pack(protocol.REQUEST_MARK, 1, 2**32 - 1, 1))
    assert answer(client)[1] == protocol.Status.FAILED
    assert ended(client)
    assert serves(server, store, entry)


@settings(max_examples=80, deadline=None)
@given(
    st.binary(min_size=1, max_size=300),
    st.sampled_from(["greeting", "request", "body"]),
    st.booleans(),
)
def test_garbage_never_ends_the_server(
    garbage_server: RangeServer,
    store: ShardStore,
    entry: ShardEntry,
    garbage: bytes,
    stage: str,
    reset: bool,
) -> None:
    if stage == "greeting":
        client = socket.create_connection(garbage_server.address, timeout=10)
    else:
        client = connect(garbage_server)
    if stage == "body":
        head = protocol.REQUEST.pack(protocol.REQUEST_MARK, 1, len(garbage), len(garbage) % 8)
        garbage = head + garbage
    with contextlib.suppress(OSError):
        client.sendall(garbage)
        if not reset:
            client.shutdown(socket.SHUT_WR)
            assert ended(client)
    client.close()
    assert serves(garbage_server, store, entry)


@pytest.fixture(scope="module")
def garbage_server(store: ShardStore) -> Iterator[RangeServer]:
    with RangeServer(store.directory, TOKEN) as made:
        yield made


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_flipped_bits_in_a_request_give_an_error_or_the_right_bytes(
    garbage_server: RangeServer, store: ShardStore, entry: ShardEntry, data: st.DataObject
) -> None:
    item = Range(entry.file, entry.generation, entry.columns["tokens"].values[0], 64)
    message = bytearray(protocol.pack_request(1, [Proof.of(entry)], [item]))
    for _ in range(data.draw(st.integers(1, 3))):
        bit = data.draw(st.integers(0, 8 * len(message) - 1))
        message[bit // 8] ^= 1 << bit % 8
    client = connect(garbage_server)
    client.sendall(message)
    received = bytearray()
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_WR)
        while more := client.recv(65536):
            received += more
    client.close()
    if len(received) < protocol.RESPONSE.size:
        return
    _, status, _, _ = protocol.read_response(received[: protocol.RESPONSE.size])
    if status == protocol.Status.OK:
        payload = bytes(received[protocol.RESPONSE.size :])
        content = store.path(entry).read_bytes()
        begin, size = entry.body
        assert payload in content[begin : begin + size], "other bytes than the shard's data"


def _never_answers(server: RangeServer) -> socket.socket:
    return socket.create_connection(server.address, timeout=10)


def _half_a_request(server: RangeServer) -> socket.socket:
    client = connect(server)
    client.sendall(protocol.REQUEST.pack(protocol.REQUEST_MARK, 1, 100, 1)[:7])
    return client


def _head_without_body(server: RangeServer) -> socket.socket:
    client = connect(server)
    client.sendall(protocol.REQUEST.pack(protocol.REQUEST_MARK, 1, 100, 1))
    return client


@pytest.mark.parametrize(
    "behave",
    [_never_answers, connect, _half_a_request, _head_without_body],
    ids=lambda f: f.__name__,
)
def test_half_open_connections_are_closed(
    hasty: RangeServer,
    store: ShardStore,
    entry: ShardEntry,
    behave: Callable[[RangeServer], socket.socket],
) -> None:
    clients = [behave(hasty) for _ in range(HASTY.max_connections)]
    assert all(ended(client) for client in clients)
    for client in clients:
        client.close()
    assert serves(hasty, store, entry), "their places are free again"


def test_clients_that_do_not_read_are_given_up(
    hasty: RangeServer, store: ShardStore, entry: ShardEntry
) -> None:
    item = Range(entry.file, entry.generation, entry.columns["tokens"].values[0], 2**20)
    slow = []
    for _ in range(2):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.close()
        client = connect(hasty)
        # More than the kernel's buffers of both ends take.
        for number in range(40):
            with contextlib.suppress(OSError):
                client.sendall(protocol.pack_request(number, [Proof.of(entry)], [item]))
        slow.append(client)
    deadline = time.monotonic() + 60
    while hasty._open and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not hasty._open
    for client in slow:
        client.close()
    assert serves(hasty, store, entry)


def test_too_many_connections_are_turned_away(
    server: RangeServer, store: ShardStore, entry: ShardEntry
) -> None:
    clients = [connect(server) for _ in range(SMALL.max_connections)]
    with socket.create_connection(server.address, timeout=10) as another:
        assert ended(another)
    for client in clients:
        client.close()
    deadline = time.monotonic() + 60
    while server._open and time.monotonic() < deadline:
        time.sleep(0.02)
    assert serves(server, store, entry)


def test_the_silent_keep_nobody_out(store: ShardStore, entry: ShardEntry) -> None:
    """However many connect and say nothing; who knows the token is answered each time."""
    with RangeServer(store.directory, TOKEN) as server:
        silent: list[socket.socket] = []
        for _ in range(12):
            silent += [socket.create_connection(server.address, timeout=10) for _ in range(30)]
            assert serves(server, store, entry)
        assert len(server._open) <= server.limits.max_strangers + 2
        for client in silent:
            client.close()


def test_who_is_turned_away_tries_again(store: ShardStore, entry: ShardEntry) -> None:
    with RangeServer(store.directory, TOKEN, limits=HASTY) as server:
        known = [connect(server) for _ in range(HASTY.max_connections)]
        # Full until the others are closed, because they ask nothing.
        assert serves(server, store, entry)
        for client in known:
            client.close()


def test_closing_breaks_connections_off_and_is_quick(store: ShardStore) -> None:
    server = RangeServer(store.directory, TOKEN)
    clients = [connect(server) for _ in range(3)]
    began = time.monotonic()
    server.close()
    server.close()
    assert time.monotonic() - began < 60
    assert all(ended(client) for client in clients)
    with pytest.raises(ConnectionError):
        socket.create_connection(server.address, timeout=5)


def test_a_forked_child_neither_keeps_nor_ends_the_server(
    store: ShardStore, entry: ShardEntry
) -> None:
    with RangeServer(store.directory, TOKEN) as server:
        kept = connect(server)
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        try:
            assert serves(server, store, entry)
            server.close()
            assert ended(kept)
            with pytest.raises(ConnectionError):
                socket.create_connection(server.address, timeout=5)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


_SERVE = """
import sys, time
from pathlib import Path
from earl_core.dispatch.remote.range_server import RangeServer
server = RangeServer(Path(sys.argv[1]), sys.argv[2])
print(server.address[1], flush=True)
time.sleep(60)
"""


def test_a_stopped_server_times_out_and_a_killed_one_is_noticed(
    store: ShardStore, entry: ShardEntry
) -> None:
    command = [sys.executable, "-c", _SERVE, str(store.directory), TOKEN]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        address = ("127.0.0.1", int(child.stdout.readline()))
        transport = TcpTransport({"a": address}, TOKEN, ClientLimits())
        hasty = TcpTransport(
            {"a": address}, TOKEN, ClientLimits(connect_seconds=1.0, stall_seconds=1.0)
        )
        item = whole(entry)
        proofs = {entry.file: Proof.of(entry)}
        into = destination(item)
        transport.read_all({"a": RemoteRead([item], into)}, proofs)
        assert bytes(into[0]) == file_bytes(store, item)
        child.send_signal(signal.SIGSTOP)
        with pytest.raises(TransportError, match="in time"):
            hasty.read_all({"a": RemoteRead([item], into)}, proofs)
        child.kill()
        child.wait()
        with pytest.raises(Exception, match=r"reached|broke off"):
            transport.read_all({"a": RemoteRead([item], into)}, proofs)
    finally:
        child.kill()
        child.wait()
    assert Path(store.path(entry)).exists()
