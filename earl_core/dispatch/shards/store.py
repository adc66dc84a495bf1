"""The shards of one run on this host: create, complete, verify, release, sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa

from earl_core.dispatch.segments.leases import Mapped, ShardMismatch, map_shared
from earl_core.dispatch.segments.pool import SegmentPool
from earl_core.dispatch.segments.pool_directory import is_sealed
from earl_core.dispatch.shards.manifest import ManifestError, ShardEntry
from earl_core.dispatch.shards.shard import ShardWriter, check_layout, table_bytes, verify_body
from earl_core.dispatch.shards.skeleton import make_skeleton
from earl_core.system.errors import NotOurs
from earl_core.system.files import check_user_directory, remove_when_empty
from earl_core.system.shared_memory import VERSIONS
from earl_core.trajectory.samples import Rows

# Texts of fixed width in the metadata, so that shards of one kind have one layout. No number equals
# them. The real generation takes its place when the segment is had.
_NO_GENERATION, _NO_ITERATION = "@" * 20, "#" * 20


class ShardStore:
    """All shards (and published weights) of one run on this host.

    `directory` is `<dispatch.directory>/<run uid>`, made and marked on first use with mode 0700.
    `max_bytes`, `wait_seconds` and `versions` are the pool's: the bytes that its shards may have,
    how long a writer waits for releases when there is no room, and how many sets of weights must
    have room beside them.
    """

    def __init__(
        self,
        directory: Path,
        max_bytes: int | None,
        wait_seconds: float = 0.0,
        versions: int = VERSIONS,
    ) -> None:
        self.directory = Path(directory)
        self.pool = SegmentPool(self.directory, max_bytes, wait_seconds, versions=versions)

    def prepare(self) -> None:
        """Make the directory; raise `OSError` with what to change if it cannot be made."""
        check_user_directory(self.directory.parent)
        try:
            self.pool.make()
        except NotOurs:
            raise
        except OSError as error:
            raise OSError(
                error.errno,
                f"shared memory at {self.directory} cannot be used ({error.strerror}): set "
                "dispatch.directory to a folder you can write, best on tmpfs",
            ) from error

    # Writing

    def create(
        self,
        *,
        stage: str,
        iteration: int,
        rank: int,
        schema: pa.Schema,
        rows: int,
        lengths: Mapping[str, np.ndarray] | None = None,
        strings: Mapping[str, Sequence[str]] | None = None,
    ) -> ShardWriter:
        """Begin a shard whose columns are then filled in place.

        lengths: int64 [rows] elements of each row, for every list column. strings: the values of
        the string columns. Raises `PoolFull` when it does not fit, `ValueError` when the columns
        do not match the schema.
        """
        encoded = {name: [v.encode() for v in column] for name, column in (strings or {}).items()}
        sizes = {name: np.array([len(v) for v in c], np.int64) for name, c in encoded.items()}
        metadata = {
            "earl.stage": stage,
            "earl.iteration": _NO_ITERATION,
            "earl.rank": str(rank),
            "earl.generation": _NO_GENERATION,
        }
        if "sample_id" not in schema.names or schema.field("sample_id").type != pa.int64():
            raise ValueError("a shard needs the column `sample_id` of type int64")
        skeleton = make_skeleton(schema, rows, {**(lengths or {}), **sizes}, metadata)
        skeleton = skeleton.with_text(_NO_ITERATION, str(iteration).zfill(20))
        self.prepare()
        segment = self.pool.acquire(skeleton.least_bytes(table_bytes(skeleton.body[1])))
        try:
            generation = segment.generation
            skeleton = skeleton.with_text(_NO_GENERATION, str(generation).zfill(20))
            name = f"{iteration:06d}-{stage}-{rank}-{generation}.arrow"
            return ShardWriter(segment, skeleton, name, encoded)
        except BaseException:
            segment.abandon()
            raise

    def publish(
        self, *, stage: str, iteration: int, rank: int, schema: pa.Schema, rows: Rows
    ) -> ShardEntry:
        """Write rows into a shard, publish and complete it; errors of `create`."""
        ids = np.array(rows.numbers["sample_id"], dtype=np.int64)
        with self.create(
            stage=stage,
            iteration=iteration,
            rank=rank,
            schema=schema,
            rows=len(ids),
            lengths=rows.lengths,
            strings=rows.strings,
        ) as writer:
            for name, values in rows.numbers.items():
                if name not in rows.lengths:
                    writer.values(name)[:] = values
                    continue
                for place, row in zip(writer.rows(name), values, strict=True):
                    place[:] = row
            return self.complete(writer.seal())

    def complete(self, entry: ShardEntry, timeout_seconds: float = 120.0) -> ShardEntry:
        """The entry with its checksum, once the background thread has it; then it may be sealed
        in a manifest. Only in the process that wrote the shard.

        Raises `TimeoutError` at the deadline, `ValueError` in any other process.
        """
        if entry.checksum:
            return entry
        if entry._pending is None:
            raise ValueError(
                f"this process did not publish {self.path(entry)}: complete a shard where it was "
                "written"
            )
        done = entry.model_copy(update={"checksum": entry._pending.result(timeout_seconds)})
        done._pending = None
        return done

    # Reading

    def path(self, entry: ShardEntry) -> Path:
        """Return the path of an entry's file; the entry's name cannot leave the directory."""
        return self.directory / entry.file

    def open(self, entry: ShardEntry, verify: bool = False) -> Mapped:
        """A lease on a shard, mapped read-only; with `verify` its whole body is checked.

        Raises `ManifestError` unless the shard is there, of this size, generation and layout, and
        its bytes match their checksum.
        """
        path = self.path(entry)
        if not entry.file.endswith(f"-{entry.generation}.arrow"):
            raise ManifestError(f"the shard {path} is of another generation than its manifest")
        try:
            mapped = map_shared(path, entry.bytes)
        except FileNotFoundError as error:
            raise ManifestError(f"the shard {path} of host {entry.host} is gone") from error
        except ShardMismatch as error:
            raise ManifestError(f"the shard is damaged: {error.strerror}") from error
        if verify or entry.checksum:
            try:
                check = verify_body if verify else check_layout
                check(mapped.memory, entry)
            except BaseException:
                # The traceback keeps views alive; the lease then goes with the last of them.
                with suppress(BufferError):
                    mapped.close()
                raise
        return mapped

    def verify(self, entry: ShardEntry, checksum: bool) -> None:
        """Raise as `open` does; without `checksum` bytes are not looked at."""
        self.open(entry, verify=checksum).close()

    # Life

    def release(self, entry: ShardEntry) -> bool:
        """Let the shard's memory be used again; False when a reader still holds it."""
        return self.pool.release(self.path(entry))

    def reserve(self, size: int) -> None:
        """Check that `size` more bytes fit, in this run's share and on the file system. Free
        segments make room if need be. Raises `PoolFull`."""
        self.prepare()
        self.pool.reserve(size)

    def adopt(self, files: set[str]) -> int:
        """Release every shard that is not in `files`, which no manifest names; returns how many.

        Called when a run is taken over: what dead processes sealed, received or were writing goes.
        """
        self.pool.sweep_unsealed()
        gone = 0
        for pattern in ("*.arrow", "*.part"):
            for path in self.directory.glob(pattern):
                if is_sealed(path.name) and path.name not in files:
                    gone += self.pool.release(path)
        return gone

    def remove(self) -> None:
        """Remove everything of this run; readers keep what they have mapped."""
        self.pool.remove()
        remove_when_empty(self.directory.parent)
