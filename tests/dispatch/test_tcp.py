"""What the transport over the network promises beyond: hostile, slow and dead servers."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earl_core.dispatch import ShardEntry, ShardStore
from earl_core.dispatch.remote import (
    Proof,
    RemoteRead,
    TransportError,
    protocol,
)
from earl_core.dispatch.remote.connection import Connection, Question
from earl_core.dispatch.remote.range_server import RangeServer
from earl_core.dispatch.remote.tcp import ClientLimits, TcpTransport
from earl_core.dispatch.remote.transport import Range
from tests.dispatch.hosts import TOKEN, destination, file_bytes, make_shard, soon, whole

_ASKED = 2**18
SOON = ClientLimits(_ASKED, connect_seconds=0.4, stall_seconds=0.4)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ShardStore]:
    made = ShardStore(tmp_path / "run", 2**28)
    yield made
    made.remove()


@pytest.fixture
def entry(store: ShardStore) -> ShardEntry:
    return make_shard(store, [70_000, 0, 3, 130_000, 1])


def read(transport: TcpTransport, entry: ShardEntry, *ranges: Range) -> list[bytes]:
    into = destination(*ranges)
    transport.read_all({"a": RemoteRead(ranges, into)}, {entry.file: Proof.of(entry)})
    return [bytes(view) for view in into]


@pytest.fixture
def server(store: ShardStore) -> Iterator[RangeServer]:
    with RangeServer(store.directory, TOKEN) as made:
        yield made


@pytest.mark.parametrize("token", ["", "wrong", TOKEN + " ", TOKEN[:-1]])
def test_a_wrong_token_is_refused(server: RangeServer, entry: ShardEntry, token: str) -> None:
    with pytest.raises(TransportError, match="token"):
        read(TcpTransport({"a": server.address}, token), entry, whole(entry))


def test_tokens_are_compared_in_constant_time(
    monkeypatch: pytest.MonkeyPatch, server: RangeServer, entry: ShardEntry
) -> None:
    compared = []
    original = protocol.hmac.compare_digest
    monkeypatch.setattr(
        protocol.hmac,
        "compare_digest",
        lambda a, b: compared.append((a, b)) or original(a, b),
    )
    read(TcpTransport({"a": server.address}, TOKEN), entry, whole(entry))
    assert len(compared) == 2, "the server's and the client's proof"
    assert all(len(a) == len(b) == protocol.PROOF_BYTES for a, b in compared)


def test_a_server_that_does_not_know_the_token_is_not_trusted(entry: ShardEntry) -> None:
    def pretend(client: socket.socket) -> None:
        client.sendall(protocol.HELLO.pack(protocol.MAGIC, bytes(32)))
        client.recv(protocol.ANSWER.size)
        client.sendall(protocol.WELCOME.pack(protocol.MAGIC, 0, bytes(32)))

    with _fake(pretend) as address, pytest.raises(TransportError, match="not trusted"):
        read(TcpTransport({"a": address}, TOKEN), entry, whole(entry))


def test_connections_are_used_again(server: RangeServer, entry: ShardEntry) -> None:
    transport = TcpTransport({"a": server.address}, TOKEN)
    for _ in range(5):
        read(transport, entry, whole(entry))
        read(transport, entry, whole(entry, "reward"))
    assert len(server._open) == 1
    transport.close()
    assert soon(lambda: not server._open)
    assert read(transport, entry, whole(entry))


def test_a_connection_that_ended_while_idle_is_made_anew(
    store: ShardStore, server: RangeServer, entry: ShardEntry
) -> None:
    transport = TcpTransport({"a": server.address}, TOKEN)
    before = read(transport, entry, whole(entry))
    server.close()
    with RangeServer(store.directory, TOKEN, port=server.address[1]):
        assert read(transport, entry, whole(entry)) == before


def test_a_server_that_is_gone_is_unreachable(server: RangeServer, entry: ShardEntry) -> None:
    transport = TcpTransport({"a": server.address}, TOKEN)
    read(transport, entry, whole(entry))
    server.close()
    with pytest.raises(TransportError, match=r"cannot be reached|broke off"):
        read(transport, entry, whole(entry))
    asked = {"b": RemoteRead([whole(entry)], destination(whole(entry)))}
    with pytest.raises(TransportError, match="no address"):
        transport.read_all(asked, {entry.file: Proof.of(entry)})


class _fake:  # noqa: N801
    """A listener whose connections `behave` handles."""

    def __init__(self, behave: Callable[[socket.socket], None]) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.behave = behave
        self.kept: list[socket.socket] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                client, _ = self.listener.accept()
                self.kept.append(client)
                self.behave(client)
        except OSError:
            return

    def __enter__(self) -> tuple[str, int]:
        return self.listener.getsockname()

    def __exit__(self, *_: object) -> None:
        self.listener.close()
        for client in self.kept:
            client.close()


def _welcome(client: socket.socket) -> None:
    nonce = os.urandom(32)
    client.sendall(protocol.HELLO.pack(protocol.MAGIC, nonce))
    _, theirs, _ = protocol.ANSWER.unpack(client.recv(protocol.ANSWER.size, socket.MSG_WAITALL))
    proof = protocol.prove(TOKEN, b"server", nonce, theirs)
    client.sendall(protocol.WELCOME.pack(protocol.MAGIC, protocol.Status.OK, proof))


def _silent_after_welcome(client: socket.socket) -> None:
    _welcome(client)


def _half_an_answer(client: socket.socket) -> None:
    _welcome(client)
    number = protocol.REQUEST.unpack(client.recv(protocol.REQUEST.size, socket.MSG_WAITALL))[1]
    client.sendall(protocol.pack_response(number, protocol.Status.OK, _ASKED, 0) + bytes(100))


@pytest.mark.parametrize(
    "behave", [lambda client: None, _silent_after_welcome, _half_an_answer], ids=["mute", "a", "b"]
)
def test_silent_peers_time_out(behave: Callable[[socket.socket], None], entry: ShardEntry) -> None:
    with _fake(behave) as address:
        began = time.monotonic()
        with pytest.raises(TransportError, match="in time"):
            read(TcpTransport({"a": address}, TOKEN, SOON), entry, whole(entry))
        assert time.monotonic() - began < 60


def test_a_peer_that_trickles_times_out(entry: ShardEntry) -> None:
    def trickle(client: socket.socket) -> None:
        _half_an_answer(client)
        for _ in range(100):
            client.sendall(b"x")
            time.sleep(0.05)

    limits = ClientLimits(_ASKED, stall_seconds=0.5, minimum_rate=2**22)
    with _fake(trickle) as address, pytest.raises(TransportError, match="in time"):
        read(TcpTransport({"a": address}, TOKEN, limits), entry, whole(entry))


def test_a_full_backlog_times_out(entry: ShardEntry) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1)
    held = []
    try:
        for _ in range(4):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
            held.append(one)
        with pytest.raises(TransportError, match="in time"):
            read(TcpTransport({"a": listener.getsockname()}, TOKEN, SOON), entry, whole(entry))
    finally:
        for one in [*held, listener]:
            one.close()


@settings(max_examples=30, deadline=None)
@given(st.binary(min_size=1, max_size=400), st.booleans())
def test_garbage_from_a_server_is_an_error(garbage: bytes, welcomed: bool) -> None:
    def babble(client: socket.socket) -> None:
        if welcomed:
            _welcome(client)
        client.sendall(garbage)
        client.shutdown(socket.SHUT_WR)

    item = Range("000001-rollout-0-5.arrow", 5, 64, 64)
    proof = Proof(item.file, 5, 4096, (64, 64), (128, 16), 4096, "0" * 16, 0)
    with _fake(babble) as address, pytest.raises(TransportError):
        TcpTransport({"a": address}, TOKEN, SOON).read_all(
            {"a": RemoteRead([item], destination(item))}, {item.file: proof}
        )


def test_bytes_damaged_on_the_way_are_found(entry: ShardEntry) -> None:
    def lie(client: socket.socket) -> None:
        _welcome(client)
        number = protocol.REQUEST.unpack(client.recv(protocol.REQUEST.size, socket.MSG_WAITALL))[1]
        size = whole(entry, "reward").length
        client.sendall(protocol.pack_response(number, protocol.Status.OK, size, 1234) + bytes(size))

    with _fake(lie) as address, pytest.raises(TransportError, match="on the way"):
        read(TcpTransport({"a": address}, TOKEN), entry, whole(entry, "reward"))


def test_requests_in_flight_are_bounded(
    monkeypatch: pytest.MonkeyPatch, store: ShardStore, entry: ShardEntry
) -> None:
    most: list[int] = []
    connections: list[Connection] = []
    original_init, original_ask = Connection.__init__, Connection.ask

    def init(self: Connection, *arguments: object) -> None:
        original_init(self, *arguments)  # type: ignore[arg-type]
        connections.append(self)

    def ask(self: Connection, question: Question, deadline: float) -> None:
        original_ask(self, question, deadline)
        asked = [list(each.asked) for each in connections]
        most.append(sum(question.size for each in asked for question in each))

    monkeypatch.setattr(Connection, "__init__", init)
    monkeypatch.setattr(Connection, "ask", ask)
    limits = ClientLimits(request_bytes=2**14, bytes_in_flight=2**16)
    with (
        RangeServer(store.directory, TOKEN) as one,
        RangeServer(store.directory, TOKEN) as two,
        RangeServer(store.directory, TOKEN) as three,
    ):
        addresses = {"a": one.address, "b": two.address, "c": three.address}
        transport = TcpTransport(addresses, TOKEN, limits)
        item = whole(entry)
        reads = {name: RemoteRead([item], destination(item)) for name in addresses}
        transport.read_all(reads, {entry.file: Proof.of(entry)})
        transport.close()
    assert max(most) <= 2**16
    assert {bytes(read.into[0]) for read in reads.values()} == {file_bytes(store, item)}
