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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from earl_core.dispatch import (
    Batch,
    Manifest,
    ManifestError,
    ShardCorrupt,
    ShardEntry,
    ShardStore,
    ShardWriter,
    StoreFull,
)
from earl_core.dispatch.checksums import BLOCK_BYTES, verify_blocks
from earl_core.dispatch.manifest import read_manifest, write_manifest
from earl_core.trajectory.samples import Columns, ListColumn
from earl_core.trajectory.schema import ADVANTAGE_SCHEMA
from tests.dispatch.episodes import episode, manifest_of, write


@pytest.fixture
def store(tmp_path: Path) -> ShardStore:
    return ShardStore(tmp_path / "store", max_bytes=2**30)


def begin(store: ShardStore, rows: int = 3, length: int = 100_000) -> ShardWriter:
    """A shard of advantages, several blocks long by default; its values are not written yet."""
    return store.create(
        stage="advantage",
        iteration=4,
        rank=0,
        schema=ADVANTAGE_SCHEMA,
        rows=rows,
        lengths={"advantages": np.full(rows, length)},
    )


def fill(writer: ShardWriter, value: float = 0.5) -> None:
    writer.values("sample_id")[:] = np.arange(len(writer.values("sample_id")))
    writer.values("advantages")[:] = value


def publish(
    store: ShardStore, value: float = 0.5, rows: int = 3, length: int = 100_000
) -> ShardEntry:
    with begin(store, rows, length) as writer:
        fill(writer, value)
        return store.complete(writer.seal())


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
        writer.row("advantages", 0)[:] = [1, 2]
        writer.row("advantages", 2)[1:] = [8, 9]
        writer.values("advantages")[2] = 7
        assert [len(row) for row in writer.rows("advantages")] == [2, 0, 3]
        entry = store.complete(writer.seal())
    assert entry.row_ids == (1, 5, 9)
    assert entry.axes == {"tokens": (2, 0, 3)}
    with Batch(store, [manifest_of(entry)]) as batch:
        assert [row.tolist() for row in batch.list_rows("advantages")] == [[1, 2], [], [7, 8, 9]]


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
    columns: Columns = {"sample_id": np.arange(2), "advantages": np.zeros(2, np.float32)}
    for wrong, words in (
        ({"advantages": ListColumn.from_rows([[1], [2]], "float64")}, "values of float32"),
        ({"advantages": ListColumn.from_rows([[1]], "float32")}, "needs 2 row lengths"),
        ({"reward": np.zeros(2)}, "do not match the schema"),
    ):
        with pytest.raises(ValueError, match=words):
            store.write(
                stage="x",
                iteration=0,
                rank=0,
                schema=ADVANTAGE_SCHEMA,
                columns={**columns, **wrong},
            )
    with pytest.raises(ValueError, match="sample_id"):
        store.create(stage="x", iteration=0, rank=0, schema=pa.schema([]), rows=1)
    with begin(store) as writer:
        with pytest.raises(ValueError, match="no numeric column"):
            writer.values("tokens")
        with pytest.raises(ValueError, match="not a list column"):
            writer.row("sample_id", 0)
        with pytest.raises(IndexError):
            writer.row("advantages", 3)
        writer.values("sample_id")[:] = [3, 3, 4]
        with pytest.raises(ValueError, match="sort the rows"):
            writer.seal()
    assert store.pool.free_bytes() == store.used_bytes()


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
    assert entry.checksums[1] == 8 * -(-entry.body[1] // BLOCK_BYTES)
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
        writer.row("advantages", 1)[:3] = [7, 8, 9]
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
from earl_core.dispatch import shard
from tests.dispatch.test_shards import begin, fill

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
    assert store.pool.free_bytes() == store.used_bytes() > 0
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
    (store.directory / "weights.safetensors").write_bytes(b"x")
    (store.directory / "fetch-1-2.part").write_bytes(b"x")
    assert store.adopt({kept.file}) == 2
    names = {path.name for path in store.directory.iterdir() if not path.name.startswith(".")}
    assert names == {kept.file, "weights.safetensors"}
    assert not store.path(dropped).exists()
    store.remove()
    assert not store.directory.exists()


def test_a_reader_keeps_a_shard_from_being_released(store: ShardStore) -> None:
    manifest = write(store, [episode(0, [(2, 3)])])
    with Batch(store, [manifest]):
        assert not store.release(manifest.shards[0])
    assert store.release(manifest.shards[0])
    assert store.pool.free_bytes() == store.used_bytes()
    assert store.trim() > 0
    with pytest.raises(ManifestError, match="is gone"):
        Batch(store, [manifest])


def test_full_store_names_what_holds_it(tmp_path: Path) -> None:
    store = ShardStore(tmp_path, max_bytes=40_000)
    write(store, [episode(0, [(50, 50)])])
    with pytest.raises(StoreFull, match=r"do not fit.*000004-rollout-0"):
        write(store, [episode(0, [(5000, 50)])])
    with pytest.raises(StoreFull, match="do not fit"):
        store.reserve(39_000)
    assert not list(tmp_path.glob(".writing*"))


def test_unsealed_files_of_dead_writers_are_swept(store: ShardStore) -> None:
    script = (
        "import sys, pathlib, time\n"
        "from tests.dispatch.test_shards import ShardStore, begin\n"
        "writer = begin(ShardStore(pathlib.Path(sys.argv[1]), 2**30))\n"
        "print('ready', flush=True); time.sleep(60)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(store.directory)], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    assert store.sweep_unsealed() == 0
    child.kill()
    child.wait()
    assert store.sweep_unsealed() == 1
    assert store.pool.free_bytes() == store.used_bytes()


# Corruption


@pytest.fixture(scope="module")
def sample_store(tmp_path_factory: pytest.TempPathFactory) -> ShardStore:
    return ShardStore(tmp_path_factory.mktemp("corrupt"), 2**30)


@pytest.fixture(scope="module")
def several_blocks(sample_store: ShardStore) -> ShardEntry:
    return publish(sample_store)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_flipped_bit_is_found(
    sample_store: ShardStore, several_blocks: ShardEntry, data: st.DataObject
) -> None:
    entry = several_blocks
    regions = [entry.body, entry.checksums]
    start, length = data.draw(st.sampled_from(regions))
    at, bit = start + data.draw(st.integers(0, length - 1)), data.draw(st.integers(0, 7))
    with sample_store.path(entry).open("r+b") as file:
        flip(file.fileno(), at, bit)
        try:
            with pytest.raises(ShardCorrupt):
                sample_store.verify(entry, checksum=True)
            with pytest.raises(ShardCorrupt):
                Batch(sample_store, [manifest_of(entry)], verify=True)
            sample_store.verify(entry, checksum=False)
        finally:
            flip(file.fileno(), at, bit)
    sample_store.verify(entry, checksum=True)


def flip(descriptor: int, at: int, bit: int) -> None:
    (byte,) = os.pread(descriptor, 1, at)
    os.pwrite(descriptor, bytes([byte ^ 1 << bit]), at)


def test_only_the_blocks_of_a_range_are_verified(
    sample_store: ShardStore, several_blocks: ShardEntry
) -> None:
    entry = several_blocks
    start, length = entry.body
    with sample_store.path(entry).open("r+b") as file, sample_store.open(entry) as mapped:
        flip(file.fileno(), start + BLOCK_BYTES + 5, 3)
        verify_blocks(mapped.memory, entry, start, BLOCK_BYTES)
        verify_blocks(mapped.memory, entry, start + 2 * BLOCK_BYTES, length - 2 * BLOCK_BYTES)
        verify_blocks(mapped.memory, entry, start + BLOCK_BYTES + 5, 0)
        for first, size in ((start, BLOCK_BYTES + 1), (start + 2 * BLOCK_BYTES - 1, 1)):
            with pytest.raises(ShardCorrupt):
                verify_blocks(mapped.memory, entry, first, size)
        flip(file.fileno(), start + BLOCK_BYTES + 5, 3)
        for first, size in ((start - 1, 1), (start, length + 1), (start, -1)):
            with pytest.raises(ManifestError, match="outside"):
                verify_blocks(mapped.memory, entry, first, size)


def test_cut_and_exchanged_shards_are_found(store: ShardStore) -> None:
    first, second = publish(store), publish(store, 0.75)
    os.rename(store.path(second), store.path(first))
    with pytest.raises(ShardCorrupt):
        store.verify(first, checksum=True)
    data = store.path(first).read_bytes()
    store.path(first).unlink()
    store.path(first).write_bytes(data[:-8])
    with pytest.raises(ManifestError, match="its manifest says"):
        Batch(store, [manifest_of(first)])
    other = first.model_copy(update={"generation": 7})
    with pytest.raises(ManifestError, match="another generation"):
        store.verify(other, checksum=False)


def test_manifest_is_checked_on_reading(tmp_path: Path, store: ShardStore) -> None:
    path = tmp_path / "rollout.json"
    write_manifest(path, write(store, [episode(0, [(2, 3)])]))
    assert read_manifest(path).stage == "rollout"
    path.write_text(path.read_text().replace('"policy_version": 4', '"policy_version": 5'))
    with pytest.raises(ManifestError, match=r"damaged.*digest"):
        read_manifest(path)
    path.write_text("{")
    with pytest.raises(ManifestError, match="damaged"):
        read_manifest(path)
    path.write_text("[" * 100_000)
    with pytest.raises(ManifestError, match="damaged"):
        read_manifest(path)
    with pytest.raises(ManifestError, match="cannot be read"):
        read_manifest(tmp_path / "nothing.json")


@pytest.fixture(scope="module")
def manifest_text(sample_store: ShardStore) -> bytes:
    manifest = write(sample_store, [episode(n, [(2, 3)]) for n in range(3)])
    named = manifest.model_copy(update={"metrics": {"seconds": 12.25}, "outputs": {"a": [1, "b"]}})
    path = sample_store.directory / "manifest.json"
    write_manifest(path, named)
    return path.read_bytes()


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_damaged_manifest_is_an_error_or_says_the_same(
    tmp_path_factory: pytest.TempPathFactory, manifest_text: bytes, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    text = bytearray(manifest_text)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        form = data.draw(st.sampled_from(["flip", "cut", "insert", "remove"]))
        if form == "flip":
            text[at] ^= 1 << data.draw(st.integers(0, 7))
        elif form == "cut":
            del text[at + 1 :]
        elif form == "insert":
            text[at:at] = data.draw(st.binary(min_size=1, max_size=3))
        else:
            del text[at : at + data.draw(st.integers(1, 40))]
        if not text:
            break
    path.write_bytes(text)
    try:
        found = read_manifest(path)
    except ManifestError:
        return
    assert found == Manifest.model_validate(json.loads(manifest_text))


@pytest.mark.parametrize("name", ["../x.arrow", "/etc/passwd", ".hidden", "a/b.arrow", "x\n"])
def test_a_manifest_cannot_name_a_file_outside_the_store(store: ShardStore, name: str) -> None:
    entry = write(store, [episode(0, [(2, 3)])]).shards[0]
    with pytest.raises(ValueError, match="file"):
        ShardEntry.model_validate({**entry.model_dump(), "file": name})


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_entry_reaches_beyond_its_shard(
    sample_store: ShardStore, several_blocks: ShardEntry, data: st.DataObject
) -> None:
    """Numbers changed at will: the entry is refused, or all its ranges lie inside of the body."""
    dumped = several_blocks.model_dump(mode="json")
    numbers = list(places(dumped))
    for _ in range(data.draw(st.integers(1, 2))):
        holder, key = data.draw(st.sampled_from(numbers))
        holder[key] = data.draw(st.integers(-10, 3_000_000))
    try:
        entry = ShardEntry.model_validate(dumped)
    except ValueError:
        return
    start, stop = entry.body[0], sum(entry.body)
    for column in entry.columns.values():
        for span in (column.values, column.offsets):
            assert span is None or start <= span[0] <= sum(span) <= stop <= entry.bytes


def places(value: object) -> list[tuple[dict | list, str | int]]:
    """Every whole number in plain JSON, as its container and key."""
    items = value.items() if isinstance(value, dict) else enumerate(value)  # type: ignore[arg-type]
    found: list[tuple[dict | list, str | int]] = []
    for key, item in items:
        if isinstance(item, dict | list):
            found += places(item)
        elif isinstance(item, int):
            found.append((value, key))  # type: ignore[arg-type]
    return found


def test_tensor_bytes_are_those_of_the_data(store: ShardStore) -> None:
    manifest = manifest_of(publish(store, length=1000))
    assert 12_000 <= manifest.tensor_bytes <= 12_000 + 256
