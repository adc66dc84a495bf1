"""Columns that lie elsewhere, written to a shard by copying them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from earl_core.dispatch import ShardEntry, ShardStore
from earl_core.trajectory.samples import ColumnTarget


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


class CopiedRows:
    """Rows whose columns are copied; scalars are arrays, strings are lists."""

    def __init__(self, columns: Columns) -> None:
        self.lengths: dict[str, np.ndarray] = {}
        self.strings: dict[str, list[str]] = {}
        self._flat: dict[str, np.ndarray] = {}
        for name, column in columns.items():
            if isinstance(column, ListColumn):
                self.lengths[name], self._flat[name] = np.diff(column.offsets), column.values
            elif isinstance(column, np.ndarray):
                self._flat[name] = column
            else:
                self.strings[name] = column

    def __len__(self) -> int:
        return len(self._flat["sample_id"])

    def fill(self, target: ColumnTarget) -> None:
        for name, values in self._flat.items():
            place = target.values(name)
            assert (place.dtype, place.shape) == (values.dtype, values.shape)
            place[:] = values


def write_columns(
    store: ShardStore, *, stage: str, iteration: int, rank: int, schema: pa.Schema, columns: Columns
) -> ShardEntry:
    """Publish columns as a shard; returns the completed entry."""
    rows = CopiedRows(columns)
    return store.publish(stage=stage, iteration=iteration, rank=rank, schema=schema, rows=rows)
