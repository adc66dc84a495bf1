"""One shard: columns written as an Arrow IPC file, and where its buffers came to lie."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from earl_core.dispatch.manifest import ColumnRange, ShardEntry
from earl_core.trajectory.samples import Columns, ListColumn


def record_batch(schema: pa.Schema, columns: Columns) -> pa.RecordBatch:
    """A record batch over the columns' own memory (no copy of numeric buffers).

    Raises `ValueError` when a column is missing, unknown, or of another length or dtype.
    """
    if set(columns) != set(schema.names):
        raise ValueError(f"columns {sorted(columns)} do not match the schema {schema.names}")
    arrays = [_array(schema.field(name), columns[name]) for name in schema.names]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _array(field: pa.Field, column: np.ndarray | ListColumn | list[str]) -> pa.Array:
    if isinstance(column, ListColumn):
        values = _numeric(field, field.type.value_type, column.values)
        offsets = np.ascontiguousarray(column.offsets, dtype=np.int64)
        buffers = [None, pa.py_buffer(offsets)]
        return pa.Array.from_buffers(field.type, len(offsets) - 1, buffers, children=[values])
    if isinstance(column, np.ndarray):
        return _numeric(field, field.type, column)
    return pa.array(column, type=field.type)


def _numeric(field: pa.Field, kind: pa.DataType, values: np.ndarray) -> pa.Array:
    if values.dtype != np.dtype(kind.to_pandas_dtype()):
        raise ValueError(f"column {field.name!r} wants {kind}, not {values.dtype}")
    contiguous = np.ascontiguousarray(values)
    return pa.Array.from_buffers(kind, len(contiguous), [None, pa.py_buffer(contiguous)])


def write_file(path: Path, batch: pa.RecordBatch, metadata: dict[str, str]) -> None:
    """Write the batch as an Arrow IPC file with `metadata` in its schema."""
    schema = batch.schema.with_metadata(metadata)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(batch.replace_schema_metadata(metadata))


def describe_file(path: Path, generation: int) -> ShardEntry:
    """The entry of a written shard: byte ranges found by address, row lengths, checksum."""
    with pa.memory_map(str(path)) as source:
        whole = source.read_buffer()
        batch = pa.ipc.open_file(pa.BufferReader(whole)).get_batch(0)
        columns = {
            name: _column_range(batch.column(name), whole.address) for name in batch.schema.names
        }
        entry = ShardEntry(
            host=socket.gethostname(),
            file=path.name,
            bytes=whole.size,
            generation=generation,
            rows=batch.num_rows,
            row_ids=tuple(batch.column("sample_id").to_pylist()),
            row_lengths=_row_lengths(batch),
            columns=columns,
            checksum=checksum(memoryview(whole), columns),
        )
        del whole, batch
    return entry


def checksum(memory: memoryview, columns: dict[str, ColumnRange]) -> str:
    """xxh3_64 over the columns' buffers in order of their names, in hex.

    Equal data has an equal checksum: the schema's metadata, which names a generation, is left out.
    """
    digest = xxhash.xxh3_64()
    for name in sorted(columns):
        for span in (columns[name].offsets, columns[name].values):
            if span is not None:
                digest.update(memory[span[0] : span[0] + span[1]])
    return digest.hexdigest()


def _row_lengths(batch: pa.RecordBatch) -> tuple[int, ...]:
    for name in ("tokens", "reference_logprobs", "advantages", "old_logprobs"):
        if name in batch.schema.names:
            offsets = np.asarray(batch.column(name).offsets)
            return tuple(int(length) for length in np.diff(offsets))
    return ()


def _column_range(array: pa.Array, base: int) -> ColumnRange:
    def span(buffer: pa.Buffer | None, itemsize: int, count: int) -> tuple[int, int]:
        # An empty array may have no buffer, or one outside of the file.
        return (buffer.address - base, itemsize * count) if buffer and count else (0, 0)

    rows = len(array)
    if pa.types.is_large_list(array.type):
        kind = array.type.value_type
        values = array.values
        width = np.dtype(kind.to_pandas_dtype()).itemsize
        return ColumnRange(
            dtype=np.dtype(kind.to_pandas_dtype()).name,
            values=span(values.buffers()[1], width, len(values)),
            offsets=span(array.buffers()[1], 8, rows + 1),
        )
    if pa.types.is_large_string(array.type):
        _, offsets, data = array.buffers()
        return ColumnRange(
            dtype="string",
            values=span(data, 1, data.size if data else 0),
            offsets=span(offsets, 8, rows + 1),
        )
    kind = np.dtype(array.type.to_pandas_dtype())
    return ColumnRange(dtype=kind.name, values=span(array.buffers()[1], kind.itemsize, rows))
