"""Arrow Flight: any Arrow client may look at a run's shards, in any language. Read-only.

Off the hot path: stages read through mappings and ranges, this is for people and their notebooks.
It runs in a process of its own (`earl shards serve`), because gRPC does not survive a fork.
Checksums are not looked at, because they need a manifest.

    client = pyarrow.flight.connect("grpc://127.0.0.1:8815")
    header = (b"authorization", b"Bearer " + open("TOKEN FILE", "rb").read())
    options = pyarrow.flight.FlightCallOptions(headers=[header])
    for info in client.list_flights(options=options):
        table = client.do_get(info.endpoints[0].ticket, options).read_all()
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyarrow import flight

from earl_core.dispatch.remote.range_server import check_token
from earl_core.dispatch.remote.transport import FILE_NAME
from earl_core.dispatch.segments.leases import ShardMismatch, map_shared
from earl_core.dispatch.shards.manifest import ManifestError
from earl_core.dispatch.shards.shard import open_batch

_MESSAGE_BYTES = 16 * 2**20
_HEADER = "authorization"


class ShardFlightServer(flight.FlightServerBase):  # type: ignore[misc]
    """Serves the sealed shards in `directory`; a flight is one shard, named by its file.

    Listens from its creation on; a context manager. Every call needs the header
    `authorization: Bearer <token>`, which travels unencrypted: beyond this machine use a private
    network or a tunnel. Raises `ValueError` for an empty token, `OSError`
    (`pyarrow.ArrowException`) when it cannot listen.
    """

    def __init__(self, directory: Path, token: str, host: str = "127.0.0.1", port: int = 0) -> None:
        check_token(token, "the Flight server")
        self.directory = Path(directory)
        self.host = host
        shown = f"[{host}]" if ":" in host else host
        super().__init__(f"grpc://{shown}:{port}", middleware={"token": _TokenCheck(token)})

    @property
    def address(self) -> str:
        """Address that clients connect to."""
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return f"grpc://{shown}:{self.port}"

    def list_flights(
        self, context: flight.ServerCallContext, criteria: bytes
    ) -> Iterator[flight.FlightInfo]:
        """Every sealed shard whose name begins with `criteria`, in order of their names."""
        prefix = criteria.decode(errors="replace")
        for path in sorted(self.directory.glob("*.arrow")):
            if path.name.startswith(prefix) and FILE_NAME.fullmatch(path.name):
                try:
                    info = self._info(path.name)
                except flight.FlightError:
                    continue  # released meanwhile
                yield info

    def get_flight_info(
        self, context: flight.ServerCallContext, descriptor: flight.FlightDescriptor
    ) -> flight.FlightInfo:
        """Schema, rows and bytes of the shard that `FlightDescriptor.for_path(file)` names."""
        return self._info(_name(descriptor))

    def get_schema(
        self, context: flight.ServerCallContext, descriptor: flight.FlightDescriptor
    ) -> flight.SchemaResult:
        """The schema of a shard; its metadata names stage, iteration, rank and generation."""
        return flight.SchemaResult(self._read(_name(descriptor)).schema)

    def do_get(
        self, context: flight.ServerCallContext, ticket: flight.Ticket
    ) -> flight.FlightDataStream:
        """The rows of a shard, some at a time; the ticket is its file name."""
        batch = self._read(ticket.ticket.decode(errors="replace"))
        rows = max(1, batch.num_rows * _MESSAGE_BYTES // max(1, batch.nbytes))
        parts = (batch.slice(first, rows) for first in range(0, batch.num_rows, rows))
        return flight.GeneratorStream(batch.schema, parts)

    def _info(self, name: str) -> flight.FlightInfo:
        batch = self._read(name)
        endpoint = flight.FlightEndpoint(name.encode(), [])
        descriptor = flight.FlightDescriptor.for_path(name)
        return flight.FlightInfo(batch.schema, descriptor, [endpoint], batch.num_rows, batch.nbytes)

    def _read(self, name: str) -> pa.RecordBatch:
        """A shard's record batch over its mapping; the lease goes with the last view of it."""
        if not FILE_NAME.fullmatch(name):
            raise flight.FlightServerError(f"{name!r} is not the name of a sealed shard")
        path = self.directory / name
        try:
            memory = map_shared(path, path.stat().st_size).memory
        except (FileNotFoundError, ShardMismatch) as error:
            raise flight.FlightServerError(
                f"the shard {name} is not here: it was released or never written"
            ) from error
        try:
            return open_batch(pa.BufferReader(pa.py_buffer(memory)), f"the shard {name}")
        except ManifestError as error:
            raise flight.FlightServerError(str(error)) from error

    def __exit__(self, *error: object) -> None:
        self.shutdown()


def _name(descriptor: flight.FlightDescriptor) -> str:
    path = descriptor.path
    if len(path) != 1:
        raise flight.FlightServerError("ask for a shard with FlightDescriptor.for_path(file)")
    return path[0].decode(errors="replace")


class _TokenCheck(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    def __init__(self, token: str) -> None:
        super().__init__()
        self._expected = f"Bearer {token}".encode()

    def start_call(
        self, info: flight.CallInfo, headers: dict[str, list[str]]
    ) -> flight.ServerMiddleware | None:
        """Let the call pass, or raise before anything is read."""
        given = headers.get(_HEADER, [])
        if len(given) != 1 or not hmac.compare_digest(given[0].encode(), self._expected):
            raise flight.FlightUnauthenticatedError(
                "send the header `authorization: Bearer <token>` with the token of the server"
            )
        return None
