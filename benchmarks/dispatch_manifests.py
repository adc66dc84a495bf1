"""Manifests as a large run would seal them, for planning without any data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from earl_core.dispatch.shards.manifest import ColumnRange, Manifest, ShardEntry
from earl_core.trajectory.schema import (
    ADVANTAGE_SCHEMA,
    REFERENCE_SCHEMA,
    REWARD_SCHEMA,
    ROLLOUT_SCHEMA,
)

BLOCK_BYTES = 256 * 1024
STAGES = {
    "rollout": ROLLOUT_SCHEMA,
    "reference": REFERENCE_SCHEMA,
    "reward": REWARD_SCHEMA,
    "advantage": ADVANTAGE_SCHEMA,
}
_TURN_COLUMNS = {"turn_starts", "policy_version_first", "policy_version_last", "turn_rewards"}
_TURNS, _REASON_BYTES = 4, 4


def manifests(tokens: np.ndarray, hosts: Sequence[str]) -> list[Manifest]:
    """The sealed manifests of all stages.

    tokens: int64 [producers, rows], tokens of each row. hosts: the host of each producer.
    """
    producers, rows = tokens.shape
    ids = np.arange(producers * rows).reshape(tokens.shape) << 16
    found = []
    for stage, schema in STAGES.items():
        shards = tuple(
            _shard(stage, number, hosts[number], ids[number], tokens[number], schema)
            for number in range(producers)
        )
        found.append(
            Manifest(
                run="scale", iteration=12, stage=stage, key="0" * 64, policy_version=12,
                shards=shards,
            ).sealed()
        )  # fmt: skip
    return found


def _shard(
    stage: str, number: int, host: str, ids: np.ndarray, tokens: np.ndarray, schema: pa.Schema
) -> ShardEntry:
    generation = 1_790_000_000_000_000_000 + number
    axes: dict[str, tuple[int, ...]] = {}
    columns, at = {}, 1024
    for field in schema:
        axis, counts = _axis(field, axes, tokens)
        if axis is not None:
            axes.setdefault(axis, tuple(counts.tolist()))
        offsets = None
        if axis is not None:
            offsets = (at, 8 * (len(ids) + 1))
            at += -(-offsets[1] // 64) * 64
        kind = field.type.value_type if pa.types.is_large_list(field.type) else field.type
        dtype = (
            "string" if pa.types.is_large_string(kind) else np.dtype(kind.to_pandas_dtype()).name
        )
        size = int(counts.sum()) * (1 if dtype == "string" else np.dtype(dtype).itemsize)
        columns[field.name] = ColumnRange(
            dtype=dtype, values=(at, size), offsets=offsets, axis=axis
        )
        at += -(-size // 64) * 64
    table = 8 * (1 - (-(at - 1024) // BLOCK_BYTES))
    return ShardEntry(
        host=host,
        file=f"000012-{stage}-{number}-{generation}.arrow",
        bytes=at + table + 4096,
        generation=generation,
        rows=len(ids),
        row_ids=tuple(ids.tolist()),
        axes=axes,
        columns=columns,
        body=(1024, at - 1024),
        checksums=(at, table),
        block_bytes=BLOCK_BYTES,
        checksum=f"{number:016x}",
    )


def _axis(
    field: pa.Field, axes: dict[str, tuple[int, ...]], tokens: np.ndarray
) -> tuple[str | None, np.ndarray]:
    """The name of a column's axis (that of its first column) and the elements of each row."""
    if pa.types.is_large_string(field.type):
        return field.name, np.full(len(tokens), _REASON_BYTES)
    if not pa.types.is_large_list(field.type):
        return None, np.ones(len(tokens), dtype=np.int64)
    if field.name in _TURN_COLUMNS:
        return "turn_starts", np.full(len(tokens), _TURNS)
    return ("tokens" if "tokens" in axes else field.name), tokens
