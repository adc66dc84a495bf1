"""Shards and manifests through their public interfaces: written, published, checked, released."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from earl_core.dispatch import (
    Batch,
    ManifestError,
    PoolFull,
    ShardStore,
)
from earl_core.dispatch.shards.shard import BLOCK_BYTES
from earl_core.trajectory.schema import ADVANTAGE_SCHEMA
from tests.columns import Columns, list_column, write_columns
from tests.dispatch.episodes import begin, episode, fill, manifest_of, publish, write
from tests.dispatch.segments import free_bytes


@pytest.fixture
def store(tmp_path: Path) -> ShardStore:
    return ShardStore(tmp_path / "store", max_bytes=2**30)


# Writing


def test_views_are_filled_in_place_row_by_row(store: ShardStore) -> None:
    with store.create(
        stage="advantage",
        iteration=0,
        rank=1,
        schema=ADVANTAGE_SCHEMA,
        rows=3,
        lengths={"advantages": np.array([2, 0, 3])},
    ) as writer:
        writer.values("sample_id")[:] = [1, 5, 9]
        writer.rows("advantages")[0][:] = [1, 2]
        writer.rows("advantages")[2][1:] = [8, 9]
        writer.values("advantages")[2] = 7
        assert [len(row) for row in writer.rows("advantages")] == [2, 0, 3]
        entry = store.complete(writer.seal())
    assert entry.row_ids == (1, 5, 9)
    assert entry.axes == {"tokens": (2, 0, 3)}
    with Batch(store, [manifest_of(entry)]) as batch:
        assert [row.tolist() for row in batch.list_rows("advantages")] == [[1, 2], [], [7, 8, 9]]


def test_the_metadata_tells_iteration_0_from_the_generation(store: ShardStore) -> None:
    columns: Columns = {
        "sample_id": np.arange(1),
        "advantages": list_column([[1.0]], "float32"),
    }
    # A segment that is used again has a new generation.
    for _ in range(2):
        entry = write_columns(
            store, stage="x", iteration=0, rank=0, schema=ADVANTAGE_SCHEMA, columns=columns
        )
        with pa.ipc.open_file(store.path(entry)) as reader:
            metadata = reader.schema.metadata
        assert int(metadata[b"earl.iteration"]) == 0
        assert int(metadata[b"earl.generation"]) == entry.generation
        store.release(entry)
    assert entry.generation != 0


def test_what_does_not_fit_the_schema_is_refused(store: ShardStore) -> None:
    with pytest.raises(ValueError, match="row lengths are given for"):
        store.create(stage="x", iteration=0, rank=0, schema=ADVANTAGE_SCHEMA, rows=1)
    with pytest.raises(ValueError, match="needs 2 row lengths"):
        store.create(
            stage="x",
            iteration=0,
            rank=0,
            schema=ADVANTAGE_SCHEMA,
            rows=2,
            lengths={"advantages": np.array([1, -1])},
        )
    columns: Columns = {"sample_id": np.arange(2), "advantages": list_column([[1]], "float32")}
    with pytest.raises(ValueError, match="needs 2 row lengths"):
        write_columns(
            store, stage="x", iteration=0, rank=0, schema=ADVANTAGE_SCHEMA, columns=columns
        )
    with pytest.raises(ValueError, match="sample_id"):
        store.create(stage="x", iteration=0, rank=0, schema=pa.schema([]), rows=1)
    with begin(store) as writer:
        with pytest.raises(ValueError, match="no numeric column"):
            writer.values("tokens")
        with pytest.raises(ValueError, match="not a list column"):
            writer.rows("sample_id")[0]
        with pytest.raises(IndexError):
            writer.rows("advantages")[3]
        writer.values("sample_id")[:] = [3, 3, 4]
        with pytest.raises(ValueError, match="sort the rows"):
            writer.seal()
    assert free_bytes(store.pool) == store.pool.used_bytes()


def test_a_sealed_shard_cannot_be_written_through_its_writer(store: ShardStore) -> None:
    with begin(store) as writer:
        fill(writer)
        writer.seal()
        with pytest.raises(ValueError, match="sealed"):
            writer.values("advantages")
        with pytest.raises(ValueError, match="sealed"):
            writer.seal()


def test_memory_is_recycled_and_its_old_bytes_never_show(store: ShardStore) -> None:
    first = publish(store, 0.25, rows=3, length=99_999)
    inode = store.path(first).stat().st_ino
    assert store.release(first)
    # Fills the segment with other bytes everywhere, paddings and gap included.
    segment = store.pool.acquire(first.bytes)
    assert os.stat(segment.path).st_ino == inode
    segment.memory[:] = b"\xee" * segment.size
    segment.abandon()
    again = publish(store, 0.25, rows=3, length=99_999)
    assert store.path(again).stat().st_ino == inode
    assert again.generation > first.generation
    assert again.checksum == first.checksum
    one, two = (manifest_of(entry).sealed() for entry in (first, again))
    assert one.data_digest() == two.data_digest()
    assert one.digest != two.digest
    with pytest.raises(ManifestError, match="is gone"):
        Batch(store, [manifest_of(first)])


def test_equal_data_has_equal_digests_wherever_it_was_written(
    store: ShardStore, tmp_path: Path
) -> None:
    episodes = [episode(n, [(2, 3)]) for n in range(3)]
    other = ShardStore(tmp_path / "other", 2**30)
    one, two = write(store, episodes), write(other, episodes, rank=1234567)
    assert one.data_digest() == two.data_digest()
    three = write(store, [episode(n, [(2, 3)]) for n in (0, 1, 3)])
    assert one.data_digest() != three.data_digest()


def test_checksums_come_after_publication_and_before_the_manifest(store: ShardStore) -> None:
    with begin(store) as writer:
        fill(writer)
        pending = writer.seal()
    assert pending.checksum == ""
    # Readers of this host need no checksum.
    with Batch(store, [manifest_of(pending)]) as batch:
        assert batch.row("advantages", 2)[-1] == 0.5
    with pytest.raises(ValueError, match="pending"):
        manifest_of(pending).sealed()
    entry = store.complete(pending)
    assert len(entry.checksum) == 16
    assert store.complete(entry) is entry
    assert entry.checksums[1] == 8 * (1 - (-entry.body[1] // BLOCK_BYTES))
    store.verify(entry, checksum=True)
    with pytest.raises(ManifestError, match="pending"):
        store.verify(pending, checksum=True)
    elsewhere = entry.model_copy(update={"checksum": "", "file": "other-1.arrow"})
    with pytest.raises(ValueError, match="did not publish"):
        store.complete(elsewhere)


def test_many_threads_publish_and_complete(store: ShardStore) -> None:
    with ThreadPoolExecutor(8) as threads:
        entries = list(threads.map(lambda n: publish(store, n, length=5000), range(40)))
    assert len({entry.file for entry in entries}) == 40
    for number, entry in enumerate(entries):
        store.verify(entry, checksum=True)
        with Batch(store, [manifest_of(entry)]) as batch:
            assert (batch.row("advantages", 1) == number).all()


def test_another_process_reads_what_was_filled_in_place(store: ShardStore) -> None:
    with begin(store) as writer:
        fill(writer)
        writer.rows("advantages")[1][:3] = [7, 8, 9]
        entry = writer.seal()
        script = """
            import json, sys
            from pathlib import Path
            from earl_core.dispatch import Batch, Manifest, ShardStore
            manifest = Manifest.model_validate(json.loads(sys.argv[2]))
            with Batch(ShardStore(Path(sys.argv[1]), 1), [manifest]) as batch:
                print(batch.row("advantages", 1)[:4].tolist())
            """
        manifest = json.dumps(manifest_of(entry).model_dump(mode="json"))
        command = [sys.executable, "-c", textwrap.dedent(script), str(store.directory), manifest]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [7, 8, 9, 0.5]


# Faults

KILLED = """
import os, signal, sys, time
from pathlib import Path
from earl_core.dispatch import ShardStore
from earl_core.dispatch.shards import shard
from tests.dispatch.episodes import begin, fill
from tests.dispatch.segments import free_bytes

def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)

store, moment = ShardStore(Path(sys.argv[1]), 2**30), sys.argv[2]
writer = begin(store)
fill(writer)
if moment == "before sealing":
    die()
if moment == "while sealing":
    os.rename = die
if moment == "after sealing, without checksums":
    shard.fill_table = die
entry = writer.seal()
store.complete(entry)
print(entry.file, flush=True)
die()
"""


@pytest.mark.parametrize(
    ("moment", "visible"),
    [
        ("before sealing", 0),
        ("while sealing", 0),
        ("after sealing, without checksums", 1),
        ("after completing", 1),
    ],
)
def test_a_producer_killed_at_any_moment_leaves_whole_shards_or_none(
    store: ShardStore, moment: str, visible: int
) -> None:
    child = subprocess.run(
        [sys.executable, "-c", KILLED, str(store.directory), moment], check=False
    )
    assert child.returncode == -signal.SIGKILL
    found = list(store.directory.glob("*.arrow"))
    assert len(found) == visible
    for path in found:
        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_file(source).read_all()
            table.validate(full=True)
            assert table.column("advantages").combine_chunks().values[-1].as_py() == 0.5
            del table
    # Whoever takes the run over finds no manifest that names them.
    assert store.adopt(set()) == visible
    assert free_bytes(store.pool) == store.pool.used_bytes() > 0
    inode = next(store.directory.glob(".free.*")).stat().st_ino
    entry = publish(store)
    assert store.path(entry).stat().st_ino == inode
    store.verify(entry, checksum=True)


def test_a_shard_is_not_recycled_while_its_checksums_are_computed(store: ShardStore) -> None:
    with begin(store, rows=20, length=1_000_000) as writer:
        fill(writer)
        entry = writer.seal()
    # The thread may be done already; if it is not, the release is refused and nothing breaks.
    while not store.release(entry):
        pass
    assert len(store.complete(entry).checksum) == 16


def test_adoption_keeps_what_manifests_name(store: ShardStore) -> None:
    kept, dropped = publish(store), publish(store)
    (store.directory / "weights-00000001.safetensors").write_bytes(b"x")
    (store.directory / "fetch-0123456789abcdef-2.part").write_bytes(b"x")
    assert store.adopt({kept.file}) == 2
    names = {path.name for path in store.directory.iterdir() if not path.name.startswith(".")}
    assert names == {kept.file, "weights-00000001.safetensors"}
    assert not store.path(dropped).exists()
    store.remove()
    assert not store.directory.exists()


def test_a_reader_keeps_a_shard_from_being_released(store: ShardStore) -> None:
    manifest = write(store, [episode(0, [(2, 3)])])
    with Batch(store, [manifest]):
        assert not store.release(manifest.shards[0])
    assert store.release(manifest.shards[0])
    assert free_bytes(store.pool) == store.pool.used_bytes()
    assert store.pool.trim() > 0
    with pytest.raises(ManifestError, match="is gone"):
        Batch(store, [manifest])


def test_full_store_names_what_holds_it(tmp_path: Path) -> None:
    store = ShardStore(tmp_path, max_bytes=40_000)
    write(store, [episode(0, [(50, 50)])])
    with pytest.raises(PoolFull, match=r"do not fit.*000004-rollout-0"):
        write(store, [episode(0, [(5000, 50)])])
    with pytest.raises(PoolFull, match="do not fit"):
        store.reserve(39_000)
    assert not list(tmp_path.glob(".writing*"))


def test_unsealed_files_of_dead_writers_are_swept(store: ShardStore) -> None:
    script = (
        "import sys, pathlib, time\n"
        "from tests.dispatch.episodes import ShardStore, begin\n"
        "writer = begin(ShardStore(pathlib.Path(sys.argv[1]), 2**30))\n"
        "print('ready', flush=True); time.sleep(60)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(store.directory)], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    assert store.pool.sweep_unsealed() == 0
    child.kill()
    child.wait()
    assert store.pool.sweep_unsealed() == 1
    assert free_bytes(store.pool) == store.pool.used_bytes()


def test_tensor_bytes_are_those_of_the_data(store: ShardStore) -> None:
    manifest = manifest_of(publish(store, length=1000))
    assert 12_000 <= manifest.tensor_bytes <= 12_000 + 256
