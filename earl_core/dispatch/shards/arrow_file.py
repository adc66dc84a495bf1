"""Opening a shard's file as Arrow does, for people who look at it: nothing in it is believed."""

from __future__ import annotations

import pyarrow as pa

from earl_core.dispatch.shards.manifest import ManifestError


def open_batch(source: pa.NativeFile, name: str) -> pa.RecordBatch:
    """The record batch of a shard's file, without copies.

    All offsets are looked at first: reading by one that lies outside ends the process. Raises
    `ManifestError` for what is no Arrow IPC file, or is damaged.
    """
    try:
        batch = pa.ipc.open_file(source).get_batch(0)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, IndexError, MemoryError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ManifestError(f"{name} is not an Arrow IPC file, or is damaged: {reason}") from error
    return batch
