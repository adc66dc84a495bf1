"""Shards that are worth spilling, and a configuration of a run that does it."""

from __future__ import annotations

import fsspec
import numpy as np
import pyarrow as pa

from earl_core.dispatch import ShardEntry, ShardStore
from earl_core.trajectory.schema import token_list
from tests.columns import Columns, ListColumn, list_column, write_columns

UID = "0123456789ab"

SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.int64(), nullable=False),
        pa.field("reason", pa.large_string(), nullable=False),
        pa.field("tokens", token_list(pa.int32()), nullable=False),
        pa.field("advantages", token_list(pa.float32()), nullable=False),
    ]
)


def columns(rows: int = 40, longest: int = 20_000, seed: int = 0) -> Columns:
    """About 5 MiB by default, so that the shard has many blocks."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, longest, rows)
    return {
        "sample_id": np.arange(rows, dtype=np.int64),
        "reason": [f"reason {row} ü" for row in range(rows)],
        "tokens": list_column([rng.integers(0, 99, n) for n in lengths], "int32"),
        "advantages": list_column([rng.normal(size=n) for n in lengths], "float32"),
    }


def written(store: ShardStore, given: Columns, stage: str = "rollout") -> ShardEntry:
    return write_columns(store, stage=stage, iteration=0, rank=0, schema=SCHEMA, columns=given)


def row(given: Columns, name: str, at: int) -> np.ndarray:
    column = given[name]
    assert isinstance(column, ListColumn)
    return column.values[column.offsets[at] : column.offsets[at + 1]]


def spilled(url: str, uid: str) -> list[str]:
    """Names of a run's shards in a spill."""
    storage, root = fsspec.core.url_to_fs(f"{url}/{uid}")
    storage.invalidate_cache()
    names = (path.rpartition("/")[2] for path in storage.find(root))
    return sorted(name for name in names if name.endswith(".arrow"))
