"""Arrow Flight: any client reads what was written, and nothing else."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from earl_core.dispatch import Batch, ShardEntry, ShardStore
from earl_core.dispatch.remote.flight import ShardFlightServer
from earl_core.run.record import write_record
from tests.dispatch.hosts import make_shard, manifest

TOKEN = "a long random word"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ShardStore]:
    made = ShardStore(tmp_path / "run", 2**28)
    made.prepare()
    yield made
    made.remove()


def serve(store: ShardStore) -> ShardFlightServer:
    return ShardFlightServer(store.directory, TOKEN)


def connect(server: ShardFlightServer) -> flight.FlightClient:
    return flight.connect(server.address)


def bearer(token: str) -> flight.FlightCallOptions:
    return flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {token}".encode())])


KNOWN = bearer(TOKEN)


def get(client: flight.FlightClient, file: str, options: Any = KNOWN) -> pa.Table:
    return client.do_get(flight.Ticket(file.encode()), options).read_all()


def test_shards_are_listed_and_read(store: ShardStore) -> None:
    entries = [make_shard(store, [900_000, 3, 0, 2_000_000], 0), make_shard(store, [7], 4)]
    (store.directory / "notes.json").write_text("{}")
    with serve(store) as server, connect(server) as client:
        infos = list(client.list_flights(options=KNOWN))
        assert [info.descriptor.path[0].decode() for info in infos] == sorted(
            entry.file for entry in entries
        )
        assert [info.total_records for info in infos] == [4, 1]
        prefix = entries[1].file.encode()
        assert len(list(client.list_flights(prefix, KNOWN))) == 1
        for entry in entries:
            table = get(client, entry.file)
            table.validate(full=True)
            with Batch(store, [manifest([entry])]) as batch:
                assert table.column("sample_id").to_pylist() == list(entry.row_ids)
                assert table.column("finish_reason").to_pylist() == batch.strings("finish_reason")
                assert table.column("reward").to_pylist() == batch.scalars("reward").tolist()
                for name in ("tokens", "loss_mask", "turn_starts"):
                    rows = [view.tolist() for view in batch.list_rows(name)]
                    assert table.column(name).to_pylist() == rows
            info = client.get_flight_info(flight.FlightDescriptor.for_path(entry.file), KNOWN)
            assert info.schema == table.schema
            assert table.schema.metadata[b"earl.stage"] == b"rollout"


def _released(store: ShardStore, entry: ShardEntry) -> bool:
    deadline = time.monotonic() + 60
    while not store.release(entry):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_no_lease_stays_after_reading(store: ShardStore) -> None:
    whole, half = make_shard(store, [900_000], 0), make_shard(store, [9_000_000] * 4, 1)
    with serve(store) as server:
        with connect(server) as client:
            get(client, whole.file)
            list(client.list_flights(options=KNOWN))
            assert _released(store, whole)
            reader = client.do_get(flight.Ticket(half.file.encode()), KNOWN)
            reader.read_chunk()
            reader.cancel()
            del reader
        assert _released(store, half)


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "notes.json", ".pool.lock", "", "w.safetensors", "\udcff"]
)
def test_other_files_are_refused(store: ShardStore, name: str) -> None:
    (store.directory / "notes.json").write_text("{}")
    with serve(store) as server, connect(server) as client:
        for ask in (
            lambda: client.do_get(
                flight.Ticket(name.encode(errors="surrogateescape")), KNOWN
            ).read_all(),
            lambda: client.get_flight_info(
                flight.FlightDescriptor.for_path(name.encode(errors="surrogateescape")), KNOWN
            ),
        ):
            with pytest.raises((flight.FlightError, pa.ArrowException, OSError)):
                ask()


def test_a_released_shard_says_so(store: ShardStore) -> None:
    entry = make_shard(store, [5])
    assert _released(store, entry)
    with (
        serve(store) as server,
        connect(server) as client,
        pytest.raises(flight.FlightServerError, match="released"),
    ):
        get(client, entry.file)


def test_a_damaged_shard_is_an_error(store: ShardStore) -> None:
    entry = make_shard(store, [5])
    with open(store.path(entry), "r+b") as file:
        file.seek(entry.bytes - 64)
        file.write(os.urandom(50))
    with (
        serve(store) as server,
        connect(server) as client,
        pytest.raises((flight.FlightError, pa.ArrowException)),
    ):
        get(client, entry.file)


def test_it_is_read_only(store: ShardStore) -> None:
    entry = make_shard(store, [5])
    with serve(store) as server, connect(server) as client:
        descriptor = flight.FlightDescriptor.for_path(entry.file)
        writer, _ = client.do_put(descriptor, pa.schema([("a", pa.int64())]), KNOWN)
        with pytest.raises(NotImplementedError):
            writer.close()
        with pytest.raises(NotImplementedError):
            list(client.do_action(flight.Action("drop", b""), KNOWN))
    assert store.path(entry).exists()


def test_a_token_is_always_needed(store: ShardStore) -> None:
    entry = make_shard(store, [5])
    with pytest.raises(ValueError, match="give it a token"):
        ShardFlightServer(store.directory, "")
    with serve(store) as server, connect(server) as client:
        ticket = flight.Ticket(entry.file.encode())
        for options in (None, bearer("wrong"), bearer(f"{TOKEN} "), bearer("")):
            with pytest.raises(flight.FlightUnauthenticatedError):
                client.do_get(ticket, options).read_all()
            with pytest.raises(flight.FlightUnauthenticatedError):
                list(client.list_flights(options=options))
        assert client.do_get(ticket, KNOWN).read_all().num_rows == 1


_CONFIG = """
name: one
iterations: 2
runs_directory: {runs}
model: {{path: models/none}}
environment: {{name: tic_tac_toe}}
rollout: {{prompts_per_iteration: 4, group_size: 2, max_turns: 5}}
dispatch: {{directory: {shared}}}
"""


def test_the_command_serves_a_run_to_who_knows_the_token(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    shared = tmp_path / "shared"
    text = _CONFIG.format(runs=tmp_path / "runs", shared=shared)
    (run / "config.yaml").write_text(text)
    write_record(run, {"uid": "0123456789ab"})
    store = ShardStore(shared / "0123456789ab", 2**24)
    entry = make_shard(store, [5])
    try:
        with _served(run) as address, flight.connect(address) as client:
            made = run / "shards.token"
            assert made.stat().st_mode & 0o777 == 0o600
            assert get(client, entry.file, bearer(made.read_text())).num_rows == 1
            with pytest.raises(flight.FlightUnauthenticatedError):
                get(client, entry.file, None)
            made.unlink()
        with _served(run, EARL_SHARDS_TOKEN=TOKEN) as address, flight.connect(address) as client:
            assert get(client, entry.file).num_rows == 1
            assert not made.exists()
    finally:
        store.remove()


@contextmanager
def _served(run: Path, **variables: str) -> Iterator[str]:
    command = [sys.executable, "-m", "flows.cli", "shards", "serve", str(run), "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **variables}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        found = re.search(r"grpc://[\d.:]+\d", process.stdout.readline())
        assert found is not None
        yield found[0]
        process.send_signal(signal.SIGINT)
        process.wait(60)
    finally:
        process.kill()
        process.wait()
