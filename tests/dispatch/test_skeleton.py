"""The layout of a shard's file, and that any Arrow client reads it."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earl_core.dispatch import Batch, ShardEntry, ShardStore
from earl_core.dispatch.shards.skeleton import make_skeleton
from earl_core.trajectory.schema import (
    ADVANTAGE_SCHEMA,
    OLD_LOGPROBS_SCHEMA,
    REFERENCE_SCHEMA,
    REWARD_SCHEMA,
    ROLLOUT_SCHEMA,
    token_list,
)
from tests.columns import list_column, write_columns
from tests.dispatch.episodes import episode, manifest_of, write

NUMBERS = [
    pa.int8(),
    pa.uint8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.float32(),
    pa.float64(),
]


def read(path: Path) -> pa.RecordBatch:
    """The shard through stock pyarrow, copied out of shared memory after a full validation."""
    with pa.memory_map(str(path)) as source:
        batch = pa.ipc.open_file(source).get_batch(0)
        batch.validate(full=True)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
    return pa.ipc.open_stream(sink.getvalue()).read_next_batch()


@st.composite
def tables(draw: st.DrawFn) -> tuple[pa.Schema, dict[str, Any], dict[str, list[Any]]]:
    """A schema with its columns as given to the store, and as Python lists."""
    rows = draw(st.integers(0, 7))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    fields = [pa.field("sample_id", pa.int64(), nullable=False)]
    ids = np.sort(rng.choice(10**6, rows, replace=False)).astype(np.int64)
    given: dict[str, Any] = {"sample_id": ids}
    lists: dict[str, list[Any]] = {"sample_id": ids.tolist()}
    for number in range(draw(st.integers(0, 6))):
        name = f"c{number}"
        form = draw(st.sampled_from(["scalar", "list", "string"]))
        kind = draw(st.sampled_from(NUMBERS))
        dtype = np.dtype(kind.to_pandas_dtype())
        if form == "string":
            fields.append(pa.field(name, pa.large_string(), nullable=False))
            given[name] = lists[name] = [draw(st.text(max_size=9)) for _ in range(rows)]
        elif form == "scalar":
            fields.append(pa.field(name, kind, nullable=False))
            given[name] = rng.integers(0, 100, rows).astype(dtype)
            lists[name] = given[name].tolist()
        else:
            fields.append(pa.field(name, token_list(kind), nullable=False))
            longest = draw(st.sampled_from([0, 3, 200]))
            parts = [rng.integers(0, 100, rng.integers(0, longest + 1)) for _ in range(rows)]
            given[name] = list_column(parts, dtype.str)
            lists[name] = [part.astype(dtype).tolist() for part in parts]
    return pa.schema(fields), given, lists


@settings(max_examples=60, deadline=None)
@given(tables())
def test_any_table_is_a_valid_arrow_file_with_aligned_buffers(
    tmp_path_factory: pytest.TempPathFactory,
    table: tuple[pa.Schema, dict[str, Any], dict[str, list[Any]]],
) -> None:
    schema, columns, expected = table
    store = ShardStore(tmp_path_factory.getbasetemp() / "any", 2**30)
    entry = write_columns(store, stage="x", iteration=1, rank=2, schema=schema, columns=columns)
    found = read(store.path(entry))
    assert found.schema.equals(schema)
    assert found.to_pydict() == expected
    check_layout(store, entry)
    assert store.release(entry)


def check_layout(store: ShardStore, entry: ShardEntry) -> None:
    """64-byte alignment, and the manifest's places are those of the Arrow metadata."""
    with pa.memory_map(str(store.path(entry))) as source:
        whole = source.read_buffer()
        batch = pa.ipc.open_file(pa.BufferReader(whole)).get_batch(0)
        assert entry.body[0] % 64 == entry.body[1] % 64 == 0
        for name, column in entry.columns.items():
            array = batch.column(name)
            start, length = column.values
            assert start % 64 == 0
            if column.offsets is not None:
                assert column.offsets[0] % 64 == 0
                assert array.buffers()[1].address - whole.address == column.offsets[0]
            values = array.values if pa.types.is_large_list(array.type) else array
            buffer = values.buffers()[-1]
            if length:
                assert buffer.address - whole.address == start
        del batch, array, values, buffer
        raw = whole.to_pybytes()
        del whole
    assert len(raw) == entry.bytes
    # A stream reader, which knows no footer, stops at the mark after the body.
    end = sum(entry.body)
    assert raw[end : end + 8] == struct.pack("<iI", -1, 0)
    assert pa.ipc.open_stream(raw[8:]).read_all().num_rows == entry.rows


@pytest.mark.parametrize(
    "schema",
    [ROLLOUT_SCHEMA, REFERENCE_SCHEMA, REWARD_SCHEMA, ADVANTAGE_SCHEMA, OLD_LOGPROBS_SCHEMA],
    ids=["rollout", "reference", "reward", "advantage", "old_logprobs"],
)
@pytest.mark.parametrize("case", ["no rows", "empty rows", "large"])
def test_every_stages_shard_is_read_by_stock_pyarrow(
    tmp_path: Path, schema: pa.Schema, case: str
) -> None:
    rows = 0 if case == "no rows" else 9
    length = 70_001 if case == "large" else 0
    store = ShardStore(tmp_path, 2**30)
    lists = [f.name for f in schema if pa.types.is_large_list(f.type)]
    strings = [f.name for f in schema if pa.types.is_large_string(f.type)]
    with store.create(
        stage="x",
        iteration=0,
        rank=0,
        schema=schema,
        rows=rows,
        lengths={name: np.full(rows, length) for name in lists},
        strings={name: ["fertig ✓"] * rows for name in strings},
    ) as writer:
        for name in set(schema.names) - set(strings):
            values = writer.values(name)
            values[:] = np.arange(len(values)).astype(values.dtype)
        entry = store.complete(writer.seal())
    batch = read(store.path(entry))
    assert batch.num_rows == rows
    assert batch.schema.equals(schema)
    for name in lists:
        assert len(batch.column(name).values) == rows * length
    for name in strings:
        assert batch.column(name).to_pylist() == ["fertig ✓"] * rows
    store.verify(entry, checksum=True)


def test_generation_is_in_name_metadata_and_manifest(tmp_path: Path) -> None:
    store = ShardStore(tmp_path, 2**30)
    entry = write(store, [episode(0, [(2, 3)])]).shards[0]
    metadata = read(store.path(entry)).schema.metadata
    assert int(metadata[b"earl.generation"]) == entry.generation
    assert entry.file == f"000004-rollout-0-{entry.generation}.arrow"
    assert metadata[b"earl.stage"] == b"rollout"
    assert int(metadata[b"earl.iteration"]) == 4


def test_token_columns_have_an_axis_of_their_own_even_where_lengths_agree(tmp_path: Path) -> None:
    store = ShardStore(tmp_path, 2**30)
    # One token and one turn in each row.
    entry = write(store, [episode(n, [(0, 1)]) for n in range(3)]).shards[0]
    axes = {name: column.axis for name, column in entry.columns.items()}
    assert axes["tokens"] == axes["loss_mask"] == axes["rollout_logprobs"] == "tokens"
    assert axes["turn_starts"] == axes["turn_rewards"] == "turns"
    assert axes["finish_reason"] == "finish_reason"
    assert axes["sample_id"] is None
    assert entry.row_lengths == (1, 1, 1)


@pytest.mark.parametrize(
    "kind",
    [
        pa.field("x", pa.int32()),
        pa.field("x", pa.list_(pa.int32()), nullable=False),
        pa.field("x", pa.large_list(pa.int32()), nullable=False),
        pa.field("x", pa.string(), nullable=False),
        pa.field("x", pa.timestamp("s"), nullable=False),
        pa.field("x", token_list(pa.large_string()), nullable=False),
    ],
    ids=str,
)
def test_types_that_a_shard_cannot_hold_are_refused(kind: pa.Field) -> None:
    lengths = {"x": np.zeros(1, np.int64)} if pa.types.is_large_list(kind.type) else {}
    with pytest.raises(ValueError, match="cannot hold column 'x'"):
        make_skeleton(pa.schema([kind]), 1, lengths, {})


CLIENTS = {
    "pyarrow": """
import pyarrow as pa
table = pa.ipc.open_file(pa.memory_map(path)).read_all()
rows = table.to_pylist()
""",
    "polars": """
import polars
rows = polars.read_ipc(path).to_dicts()
assert polars.scan_ipc(path).select("tokens").collect()["tokens"].to_list() == [
    row["tokens"] for row in rows
]
""",
    "duckdb": """
import duckdb, pyarrow.dataset
shard = pyarrow.dataset.dataset(path, format="ipc")
query = duckdb.sql("select * from shard where turns >= 0 order by sample_id")
names = [column[0] for column in query.description]
rows = [dict(zip(names, row)) for row in query.fetchall()]
""",
}


@pytest.mark.parametrize("client", sorted(CLIENTS))
def test_other_clients_read_shards_without_us(tmp_path: Path, client: str) -> None:
    pytest.importorskip(client)
    store = ShardStore(tmp_path, 2**30)
    episodes = [episode(n, [(3, n), (1, 5)], f"ende {n} ü") for n in range(5)]
    path = store.path(write(store, episodes).shards[0])
    script = (
        f"import sys, json\npath = sys.argv[1]\n{CLIENTS[client]}\n"
        "assert not any(name.startswith('earl_core') for name in sys.modules)\n"
        "print(json.dumps(rows))"
    )
    command = [sys.executable, "-c", script, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    for row, played in zip(rows, episodes, strict=True):
        sample = played.samples[0]
        assert row["tokens"] == sample.tokens
        assert row["finish_reason"] == played.finish_reason
        assert row["turn_starts"] == sample.turn_starts
        assert row["turns"] == 2
        assert np.float32(row["rollout_logprobs"]).tolist() == pytest.approx(
            sample.rollout_logprobs, abs=1e-7
        )


def test_the_work_does_not_grow_with_the_data() -> None:
    lengths = {f.name: np.full(4, 2**40) for f in ROLLOUT_SCHEMA if pa.types.is_large_list(f.type)}
    for name in (f.name for f in ROLLOUT_SCHEMA if pa.types.is_large_string(f.type)):
        lengths[name] = np.zeros(4, np.int64)
    skeleton = make_skeleton(ROLLOUT_SCHEMA, 4, lengths, {})
    assert skeleton.body[1] > 2**44
    assert len(skeleton.prefix) + len(skeleton.footer) < 10_000


def test_an_empty_shard_is_a_batch_without_rows(tmp_path: Path) -> None:
    store = ShardStore(tmp_path, 2**30)
    manifest = manifest_of(write(store, []).shards[0])
    with Batch(store, [manifest], verify=True) as batch:
        assert len(batch) == 0
        assert batch.list_rows("tokens") == []
        assert batch.scalars("turns").dtype == np.int32
        assert batch.strings("finish_reason") == []
