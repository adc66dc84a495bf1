"""Rows as they come out of a shard."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa

from earl_core.dispatch import ShardStore
from earl_core.trajectory.samples import Rows


def published(rows: Rows, schema: pa.Schema) -> tuple[pa.RecordBatch, str]:
    """A validated copy of what stock pyarrow reads of the rows' shard, and the data's checksum."""
    with tempfile.TemporaryDirectory() as directory:
        store = ShardStore(Path(directory), 2**30)
        entry = store.publish(stage="test", iteration=0, rank=0, schema=schema, rows=rows)
        batch = pa.ipc.open_file(store.path(entry).read_bytes()).get_batch(0)
    batch.validate(full=True)
    return batch, entry.checksum
