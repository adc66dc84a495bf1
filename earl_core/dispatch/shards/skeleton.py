"""The Arrow IPC file around a shard's buffers: everything but the data, before there is data.

    prefix   magic, schema message, record batch message, zeros up to 64 bytes
    body     the buffers, each from a multiple of 64 bytes on
    end      the end-of-stream mark
    gap      of any size; holds the block table
    footer   at the very end of the file

pyarrow writes a batch of one row; its record batch message and footer are then told the real number
of rows and places of buffers. These numbers are fixed-size fields of flatbuffers, so the messages
keep their size, and the work does not depend on the size of the data.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import pyarrow as pa

from earl_core.dispatch.shards.manifest import ColumnRange, Span

ALIGNMENT = 64
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"

_MAGIC = b"ARROW1"
_AXIS = b"earl.axis"
# Field numbers of the flatbuffers tables in Arrow's File.fbs and Message.fbs.
_FOOTER_BATCHES = 3
_MESSAGE_HEADER, _MESSAGE_BODY_LENGTH = 2, 3
_BATCH_LENGTH, _BATCH_NODES, _BATCH_BUFFERS = 0, 1, 2


@dataclass(frozen=True)
class Skeleton:
    """An Arrow file without its data. `columns` and `body` count from the start of the file."""

    prefix: bytes
    footer: bytes
    rows: int
    columns: dict[str, ColumnRange]
    axes: dict[str, np.ndarray]
    body: Span

    @property
    def body_end(self) -> int:
        """First byte after the body."""
        return self.body[0] + self.body[1]

    def with_text(self, old: str, new: str) -> Skeleton:
        """The same with other text of equal length in its metadata."""
        if len(old.encode()) != len(new.encode()):
            raise ValueError(f"{old!r} and {new!r} differ in length, so places would move")
        swapped = [part.replace(old.encode(), new.encode()) for part in (self.prefix, self.footer)]
        return replace(self, prefix=swapped[0], footer=swapped[1])

    def table(self, size: int, length: int) -> Span:
        """Place a table of `length` bytes in a file of `size` bytes: before the footer."""
        start = (size - len(self.footer) - length) // 8 * 8
        return start, length

    def least_bytes(self, table_length: int) -> int:
        """The smallest file that holds everything."""
        return self.body_end + len(END_OF_STREAM) + table_length + 8 + len(self.footer)


def make_skeleton(
    schema: pa.Schema, rows: int, lengths: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> Skeleton:
    """Lay out a file of one record batch.

    lengths: int64 elements of each row, for every list column; bytes of UTF-8 for string columns.
    metadata goes into the schema. Columns whose field has the metadata `earl.axis` count along the
    axis of that name, others along one of their own name. Raises `ValueError` for types that a
    shard cannot hold and for lengths that do not fit.
    """
    variable = {field.name for field in schema if not _is_scalar(field)}
    if len(set(schema.names)) != len(schema):
        raise ValueError(f"the schema names a column twice: {schema.names}")
    if set(lengths) != variable:
        raise ValueError(
            f"row lengths are given for {sorted(lengths)}, but the schema's list and string "
            f"columns are {sorted(variable)}"
        )
    axes, axis_of = _axes(schema, rows, lengths)
    columns: dict[str, ColumnRange] = {}
    at = 0
    for field in schema:
        axis = axis_of.get(field.name)
        offsets = None if axis is None else (at, 8 * (rows + 1))
        at += 0 if offsets is None else _aligned(offsets[1])
        dtype = _dtype(field)
        elements = rows if axis is None else int(axes[axis].sum())
        size = elements * (1 if dtype == "string" else np.dtype(dtype).itemsize)
        columns[field.name] = ColumnRange(
            dtype=dtype, values=(at, size), offsets=offsets, axis=axis
        )
        at += _aligned(size)
    # pyarrow takes most of a millisecond to write its example; shards of one kind share it.
    key = (schema.serialize().to_pybytes(), tuple(sorted(metadata.items())))
    messages = _Messages(_example_file(*key))
    prefix = messages.prefix(rows, columns, axes, at)
    footer = messages.footer(len(prefix), at)
    placed = {name: _moved(column, len(prefix)) for name, column in columns.items()}
    return Skeleton(prefix, footer, rows, placed, axes, (len(prefix), at))


def _aligned(size: int, to: int = ALIGNMENT) -> int:
    return -(-size // to) * to


def _moved(column: ColumnRange, by: int) -> ColumnRange:
    (values, size), offsets = column.values, column.offsets
    moved = None if offsets is None else (offsets[0] + by, offsets[1])
    return column.model_copy(update={"values": (values + by, size), "offsets": moved})


def _is_scalar(field: pa.Field) -> bool:
    return not (pa.types.is_large_list(field.type) or pa.types.is_large_string(field.type))


def _dtype(field: pa.Field) -> str:
    """The manifest's name of a column's type. Raises `ValueError` when a shard cannot hold it."""
    kind, nullable = field.type, field.nullable
    if pa.types.is_large_list(kind):
        nullable = nullable or kind.value_field.nullable
        kind = kind.value_type
    if not nullable:
        if pa.types.is_large_string(kind) and kind == field.type:
            return "string"
        name = {"float": "float32", "double": "float64"}.get(str(kind), str(kind))
        if name in ("int8", "uint8", "int16", "int32", "int64", "float32", "float64"):
            return name
    raise ValueError(
        f"a shard cannot hold column {field.name!r} of type {field.type}: use numbers, large_list "
        "of numbers or large_string, none of them nullable"
    )


def axis_name(field: pa.Field) -> str:
    """The axis along which a list or string column counts its elements. Never guessed from equal
    lengths: the shards of a stage must agree on what is counted."""
    return (field.metadata or {}).get(_AXIS, b"").decode() or str(field.name)


def _axes(
    schema: pa.Schema, rows: int, lengths: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Row lengths by axis, and the axis of each list or string column."""
    axes: dict[str, np.ndarray] = {}
    axis_of: dict[str, str] = {}
    for field in schema:
        if field.name not in lengths:
            continue
        given = np.asarray(lengths[field.name], dtype=np.int64)
        if given.shape != (rows,) or (given < 0).any():
            raise ValueError(
                f"column {field.name!r} needs {rows} row lengths of 0 or more, not "
                f"{given.shape} from {given.min(initial=0)}"
            )
        axis = axis_name(field)
        if not np.array_equal(axes.setdefault(axis, given), given):
            raise ValueError(f"column {field.name!r} has other row lengths than its axis {axis!r}")
        axis_of[field.name] = axis
    return axes, axis_of


@lru_cache(maxsize=64)
def _example_file(schema_bytes: bytes, metadata: tuple[tuple[str, str], ...]) -> bytes:
    """Write, with pyarrow, a file of one row of a serialised schema with this metadata."""
    schema = pa.ipc.read_schema(pa.py_buffer(schema_bytes)).with_metadata(dict(metadata))
    arrays = [pa.array([_example(field)], type=field.type) for field in schema]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
    return bytes(sink.getvalue())


class _Messages:
    """The schema, the record batch message and the footer in a file that pyarrow wrote."""

    def __init__(self, example: bytes) -> None:
        file = bytearray(example)
        # Magic and two zeros; then messages, each after a mark and the length of its flatbuffer.
        self._schema_end = 16 + _int32(file, 12)
        flatbuffer = self._schema_end + 8
        batch_end = flatbuffer + _int32(file, self._schema_end + 4)
        self._start = bytes(file[: self._schema_end])
        self._batch = file[flatbuffer:batch_end]
        tail = len(_MAGIC) + 4
        footer_length = _int32(file, len(file) - tail)
        self._footer = file[len(file) - tail - footer_length : len(file) - tail]

    def prefix(
        self,
        rows: int,
        columns: Mapping[str, ColumnRange],
        axes: Mapping[str, np.ndarray],
        body_length: int,
    ) -> bytes:
        """Everything before the body; its length is a multiple of 64 bytes. `columns` count from
        the start of the body."""
        message = self._batch
        root = _root(message)
        struct.pack_into("<q", message, _field(message, root, _MESSAGE_BODY_LENGTH), body_length)
        batch = _follow(message, _field(message, root, _MESSAGE_HEADER))
        struct.pack_into("<q", message, _field(message, batch, _BATCH_LENGTH), rows)
        nodes: list[int] = []
        buffers: list[int] = []
        for column in columns.values():
            start, size = column.values
            nodes += (rows, 0)
            if column.offsets is not None:
                # Nothing is null, so there are no bits that say what is.
                buffers += (column.offsets[0], 0, *column.offsets)
                if column.dtype != "string":
                    nodes += (size // column.itemsize, 0)
                    buffers += (start, 0)
            else:
                buffers += (start, 0)
            buffers += (start, size)
        _set_vector(message, batch, _BATCH_NODES, nodes)
        _set_vector(message, batch, _BATCH_BUFFERS, buffers)
        self._message_bytes = _aligned(self._schema_end + 8 + len(message)) - self._schema_end
        padded = bytes(message).ljust(self._message_bytes - 8, b"\0")
        return self._start + struct.pack("<iI", -1, len(padded)) + padded

    def footer(self, body_start: int, body_length: int) -> bytes:
        """The end of the file; its length keeps it aligned in a file of a multiple of 8 bytes."""
        footer = self._footer
        place = _follow(footer, _field(footer, _root(footer), _FOOTER_BATCHES))
        struct.pack_into(
            "<qiiq",
            footer,
            place + 4,
            body_start - self._message_bytes,
            self._message_bytes,
            0,
            body_length,
        )
        tail = len(_MAGIC) + 4
        padded = bytes(footer).ljust(_aligned(len(footer) + tail, 8) - tail, b"\0")
        return padded + struct.pack("<i", len(padded)) + _MAGIC


def _example(field: pa.Field) -> object:
    if pa.types.is_large_list(field.type):
        return [0]
    return "x" if pa.types.is_large_string(field.type) else 0


def _int32(data: bytearray, at: int) -> int:
    return int(struct.unpack_from("<i", data, at)[0])


def _root(flatbuffer: bytearray) -> int:
    return _int32(flatbuffer, 0)


def _follow(flatbuffer: bytearray, at: int) -> int:
    return at + _int32(flatbuffer, at)


def _field(flatbuffer: bytearray, table: int, number: int) -> int:
    """Return the offset at which field `number` of a table is stored."""
    vtable = table - _int32(flatbuffer, table)
    (size,) = struct.unpack_from("<H", flatbuffer, vtable)
    slot = 4 + 2 * number
    (offset,) = struct.unpack_from("<H", flatbuffer, vtable + slot) if slot < size else (0,)
    if not offset:
        raise RuntimeError(f"this pyarrow writes Arrow messages without field {number}")
    return table + int(offset)


def _set_vector(flatbuffer: bytearray, table: int, number: int, values: list[int]) -> None:
    """Replace a vector of structs of two int64."""
    at = _follow(flatbuffer, _field(flatbuffer, table, number))
    if 2 * _int32(flatbuffer, at) != len(values):
        raise RuntimeError("this pyarrow lays out record batches in another way than 25 does")
    struct.pack_into(f"<{len(values)}q", flatbuffer, at + 4, *values)
