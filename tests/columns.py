"""Columns that lie elsewhere, written to a shard by copying them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from earl_core.dispatch import ShardEntry, ShardStore
from earl_core.trajectory.samples import Rows


@dataclass(frozen=True)
class ListColumn:
    """A `large_list` column: flat values and int64 offsets of length rows + 1."""

    values: np.ndarray
    offsets: np.ndarray


def list_column(rows: Sequence[Sequence[float] | np.ndarray], dtype: str) -> ListColumn:
    """Concatenate one sequence per row."""
    lengths = [len(row) for row in rows]
    values = np.concatenate([np.empty(0, dtype), *rows]).astype(dtype)
    return ListColumn(values, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))


Columns = dict[str, "np.ndarray | ListColumn | list[str]"]


def copied_rows(columns: Columns) -> Rows:
    """Rows of these columns; scalars are arrays, strings are lists."""
    numbers: dict[str, Any] = {}
    lengths: dict[str, np.ndarray] = {}
    strings: dict[str, list[str]] = {}
    for name, column in columns.items():
        if isinstance(column, ListColumn):
            lengths[name] = np.diff(column.offsets)
            numbers[name] = np.split(column.values, column.offsets[1:-1])[: len(lengths[name])]
        elif isinstance(column, np.ndarray):
            numbers[name] = column
        else:
            strings[name] = column
    return Rows(numbers, lengths, strings)


def write_columns(
    store: ShardStore, *, stage: str, iteration: int, rank: int, schema: pa.Schema, columns: Columns
) -> ShardEntry:
    """Publish columns as a shard; returns the completed entry."""
    rows = copied_rows(columns)
    return store.publish(stage=stage, iteration=iteration, rank=rank, schema=schema, rows=rows)
