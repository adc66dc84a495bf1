"""Ten thousand random damages to manifests and shards: each is an error, or changes nothing read.

What a damage may hit without any harm are bytes that no column lies in (padding, the gap, the
Arrow messages that stock readers use); then the data that is read must still be equal.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from earl_core.config import parse_config
from earl_core.dispatch import Batch, Manifest, ManifestError, ShardEntry, ShardStore
from earl_core.dispatch.remote import Proof, TransportError
from earl_core.dispatch.remote.range_server import RangeServer
from earl_core.dispatch.remote.tcp import TcpTransport
from earl_core.dispatch.remote.transport import Range, RemoteRead
from earl_core.dispatch.shards.manifest import read_manifest, write_manifest
from earl_core.dispatch.spill.storage import Spill, SpillError
from earl_core.run import RunDirectory
from earl_core.trajectory.schema import per_token
from tests.dispatch.spilled import UID

MANIFESTS, LOCAL, SPILLED, REMOTE, RESUMED = 5200, 2000, 1500, 1000, 300
"""Damages for each way of reading: 10,000 together, more where reading is quick."""


@pytest.fixture(
    params=[pytest.param(5, id="a fifth"), pytest.param(1, id="all", marks=pytest.mark.campaign)]
)
def share(request: pytest.FixtureRequest) -> int:
    """One in so many of them is tried."""
    return int(request.param)


TOKEN = "a token of the tests"
ROWS = 12
SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.int64(), nullable=False),
        pa.field("finish_reason", pa.large_string(), nullable=False),
        per_token("tokens", pa.int32()),
        per_token("loss_mask", pa.uint8()),
        per_token("advantages", pa.float32()),
    ]
)
LISTS = ("tokens", "loss_mask", "advantages")
Damage = Callable[[np.random.Generator, bytearray], None]


def publish(store: ShardStore) -> ShardEntry:
    """About 700 KB: three blocks and several columns in each."""
    draw = np.random.default_rng(5)
    lengths = draw.integers(0, 13_000, ROWS)
    with store.create(
        stage="rollout",
        iteration=0,
        rank=0,
        schema=SCHEMA,
        rows=ROWS,
        lengths=dict.fromkeys(LISTS, lengths),
        strings={"finish_reason": [f"reason {row}" for row in range(ROWS)]},
    ) as writer:
        writer.values("sample_id")[:] = np.arange(ROWS)
        for name in LISTS:
            values = writer.values(name)
            values[:] = draw.integers(0, 100, len(values))
        return store.complete(writer.seal())


def manifest_of(entry: ShardEntry, run: str = "r", key: str = "k") -> Manifest:
    return Manifest(
        run=run, iteration=0, stage="rollout", key=key, policy_version=0, shards=(entry,)
    )


def content(batch: Batch) -> list[bytes]:
    """Everything that the batch gives, as bytes."""
    with batch:
        found = [row.tobytes() for name in LISTS for row in batch.list_rows(name)]
        found.append(batch.scalars("sample_id").tobytes())
        return [*found, *(text.encode() for text in batch.strings("finish_reason"))]


# Damages of a file's bytes that keep its length


def flip_bits(draw: np.random.Generator, data: bytearray) -> None:
    for at in draw.integers(0, len(data), draw.integers(1, 4)):
        data[at] ^= 1 << int(draw.integers(0, 8))


def overwrite(draw: np.random.Generator, data: bytearray) -> None:
    at = int(draw.integers(0, len(data)))
    noise = draw.bytes(int(draw.integers(1, 5000)))
    data[at : at + len(noise)] = noise[: len(data) - at]


def zero_a_page(draw: np.random.Generator, data: bytearray) -> None:
    at = int(draw.integers(0, len(data) // 4096)) * 4096
    data[at : at + 4096] = bytes(len(data[at : at + 4096]))


def exchange_pages(draw: np.random.Generator, data: bytearray) -> None:
    a, b = (int(n) * 4096 for n in draw.integers(0, len(data) // 4096, 2))
    data[a : a + 4096], data[b : b + 4096] = data[b : b + 4096], data[a : a + 4096]


def damage_the_ends(draw: np.random.Generator, data: bytearray) -> None:
    """The Arrow messages, the block table and the footer are small: they are aimed at."""
    at = int(draw.integers(0, 2500))
    at = at if draw.random() < 0.5 else len(data) - 1 - at
    data[at] ^= int(draw.integers(1, 256))


DAMAGES: tuple[Damage, ...] = (flip_bits, overwrite, zero_a_page, exchange_pages, damage_the_ends)


def damaged(draw: np.random.Generator, whole: bytes) -> bytearray:
    data = bytearray(whole)
    while data == whole:
        DAMAGES[int(draw.integers(0, len(DAMAGES)))](draw, data)
    return data


@dataclass
class Shard:
    """A published shard whose bytes in shared memory can be damaged and mended."""

    store: ShardStore
    entry: ShardEntry
    whole: bytes

    def put(self, data: bytes) -> None:
        """Write in place: readers keep their mappings, as of memory that goes bad."""
        descriptor = os.open(self.store.path(self.entry), os.O_WRONLY)
        try:
            os.pwrite(descriptor, data, 0)
        finally:
            os.close(descriptor)


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    store = ShardStore(tmp_path / "shm" / "run", 2**28)
    entry = publish(store)
    yield Shard(store, entry, store.path(entry).read_bytes())
    store.remove()


def survive(
    shard: Shard, times: int, read: Callable[[], object], error: type[Exception], words: str = ""
) -> None:
    """Read damaged versions: the same comes as from the whole shard, or this error."""
    expected = read()
    draw = np.random.default_rng(17)
    found = harmless = 0
    for _ in range(times):
        shard.put(damaged(draw, shard.whole))
        try:
            assert read() == expected, "wrong data was read without an error"
            harmless += 1
        except error as caught:
            if words not in str(caught):
                raise
            found += 1
    shard.put(shard.whole)
    assert read() == expected
    assert found > times / 2
    assert harmless > 0


# Reading


def test_local_reads_with_verify_always(shard: Shard, share: int) -> None:
    manifest = manifest_of(shard.entry)
    read = partial(Batch, shard.store, [manifest], verify=True)
    survive(shard, LOCAL // share, lambda: content(read()), ManifestError, "is corrupt")


def test_remote_reads(shard: Shard, share: int) -> None:
    entry = shard.entry
    proofs = {entry.file: Proof.of(entry)}
    spans = [column.values for column in entry.columns.values()]
    ranges = [Range(entry.file, entry.generation, start, length) for start, length in spans]
    with RangeServer(shard.store.directory, TOKEN) as server:
        transport = TcpTransport({"a": server.address}, TOKEN)

        def read() -> list[bytes]:
            into = [memoryview(bytearray(length)) for _, length in spans]
            transport.read_all({"a": RemoteRead(ranges, into)}, proofs)
            return [bytes(each) for each in into]

        survive(shard, REMOTE // share, read, TransportError)
        transport.close()


def test_spill_reads(shard: Shard, share: int, tmp_path: Path) -> None:
    entry = shard.entry
    spill = Spill(f"file://{tmp_path}/spill", UID)
    assert spill.put(shard.store.path(entry), entry)
    (file,) = (tmp_path / "spill" / UID).glob("*.arrow")
    target = shard.store.directory / "restored"

    def restored() -> bytes:
        spill.restore(entry, target)
        start, length = entry.body
        return target.read_bytes()[start : start + length]

    draw = np.random.default_rng(23)
    expected = restored()
    found = 0
    times = SPILLED // share
    for _ in range(times):
        data = damaged(draw, shard.whole)
        if draw.random() < 0.1:
            del data[int(draw.integers(0, len(data))) :]  # storage that lost the end
        file.write_bytes(data)
        target.unlink(missing_ok=True)
        try:
            assert restored() == expected, "wrong data was read without an error"
        except (ManifestError, SpillError):
            found += 1
            assert not target.exists(), "a damaged shard was restored"
    assert times / 2 < found <= times


def test_resume_reads(share: int, tmp_path: Path) -> None:
    """A resumed run uses a sealed stage only if its shards are whole."""
    config = parse_config(
        {
            "name": "a",
            "runs_directory": str(tmp_path / "runs"),
            "iterations": 2,
            "model": {"path": "models/x"},
            "environment": {"name": "tic_tac_toe"},
            "rollout": {"prompts_per_iteration": 4, "group_size": 2, "max_turns": 5},
            "dispatch": {"directory": str(tmp_path / "shm")},
        }
    )
    run = RunDirectory.open(config)
    entry = publish(run.store)
    run.seal(manifest_of(entry, run.uid))
    run.close()
    shard = Shard(run.store, entry, run.store.path(entry).read_bytes())

    def read() -> list[bytes]:
        resumed = RunDirectory.open(config)
        try:
            manifest = resumed.sealed(0, "rollout", "k")
            if manifest is None:
                raise LookupError("the stage is repeated")
            return content(Batch(resumed.store, [manifest]))
        finally:
            resumed.close()

    survive(shard, RESUMED // share, read, LookupError)
    finished = RunDirectory.open(config)
    finished.finish()
    finished.close()


# Manifests


def change_text(draw: np.random.Generator, text: bytearray) -> None:
    at = int(draw.integers(0, len(text)))
    form = draw.choice(["flip", "cut", "insert", "remove", "digit", "exchange"])
    if form == "flip":
        text[at] ^= 1 << int(draw.integers(0, 8))
    elif form == "cut":
        del text[at + 1 :]
    elif form == "insert":
        text[at:at] = draw.bytes(int(draw.integers(1, 6)))
    elif form == "remove":
        del text[at : at + int(draw.integers(1, 60))]
    elif form == "digit":
        digits = [place for place, byte in enumerate(text) if 48 <= byte <= 57]
        text[digits[at % len(digits)]] = 48 + int(draw.integers(0, 10))
    else:
        other = int(draw.integers(0, len(text)))
        text[at], text[other] = text[other], text[at]


def test_manifests(shard: Shard, share: int, tmp_path: Path) -> None:
    path = tmp_path / "rollout.json"
    whole = write_manifest(path, manifest_of(shard.entry))
    text = path.read_bytes()
    expected = content(Batch(shard.store, [whole]))
    draw = np.random.default_rng(29)
    found = 0
    times = MANIFESTS // share
    for _ in range(times):
        changed = bytearray(text)
        while changed == text:
            change_text(draw, changed)
        path.write_bytes(changed)
        try:
            manifest = read_manifest(path)
        except ManifestError:
            found += 1
            continue
        assert manifest == whole, "another manifest was accepted"
        assert content(Batch(shard.store, [manifest])) == expected
    assert found > times / 2
