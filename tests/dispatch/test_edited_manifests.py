"""Manifests that were edited and sealed again: refused, or read as what was written."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from earl_core.dispatch import Batch, Manifest, ManifestError, ShardEntry, ShardStore
from earl_core.dispatch.remote import Proof, TransportError
from earl_core.dispatch.remote.range_server import leased_views
from earl_core.dispatch.remote.transport import Range
from earl_core.dispatch.shards.manifest import await_manifest, parse_manifest, write_manifest
from earl_core.dispatch.spill.storage import Spill
from tests.dispatch.episodes import episode, manifest_of, write
from tests.dispatch.spilled import UID

Edit = Callable[[dict[str, Any]], None]
READ = ("tokens", "loss_mask", "rollout_logprobs", "policy_version_first", "turn_rewards")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ShardStore:
    return ShardStore(tmp_path_factory.mktemp("edited") / "store", 2**30)


@pytest.fixture(scope="module")
def whole(store: ShardStore) -> Manifest:
    """Two shards whose rows differ in everything."""
    one = [episode(n, [(3 + n, 4), (2, n + 1)]) for n in range(4)]
    two = [episode(n, [(3 + n, 4), (2, n + 1)], "lost") for n in range(4, 8)]
    parts = [write(store, some, rank).shards[0] for rank, some in enumerate((one, two))]
    return manifest_of(*parts).sealed()


def _set(entry: dict[str, Any], key: str, value: object) -> None:
    entry[key] = value


def _swap(values: list[Any], a: int, b: int) -> None:
    values[a], values[b] = values[b], values[a]


def _move(values: list[int], a: int, b: int) -> None:
    values[a], values[b] = values[a] - 1, values[b] + 1


def _cross(entry: dict[str, Any], a: str, b: str, what: str) -> None:
    columns = entry["columns"]
    columns[a][what], columns[b][what] = columns[b][what], columns[a][what]


def edits(manifest: Manifest) -> Iterator[tuple[str, Edit]]:
    """What a hostile or clumsy hand may change in the first shard's entry, and between the two."""
    entry = manifest.shards[0]
    first = lambda edit: lambda raw: edit(raw["shards"][0])  # noqa: E731
    yield "ids swapped", first(lambda e: _swap(e["row_ids"], 0, 1))
    yield "ids reversed", first(lambda e: e["row_ids"].reverse())
    yield "ids shifted", first(lambda e: _set(e, "row_ids", [i + 100 for i in e["row_ids"]]))
    yield "an id twice", first(lambda e: e["row_ids"].__setitem__(1, e["row_ids"][0]))
    yield "an id of the other", first(lambda e: e["row_ids"].__setitem__(0, 5))
    yield "a huge id", first(lambda e: e["row_ids"].__setitem__(0, 2**80))

    def trade(raw: dict[str, Any]) -> None:
        a, b = raw["shards"]
        a["row_ids"], b["row_ids"] = b["row_ids"], a["row_ids"]

    yield "ids of the two crossed", trade
    yield "shards in another order", lambda raw: raw["shards"].reverse()
    yield "a shard twice", lambda raw: raw["shards"].append(raw["shards"][0])

    def files(raw: dict[str, Any]) -> None:
        for key in ("file", "generation"):
            _cross({"columns": dict(enumerate(raw["shards"]))}, 0, 1, key)  # type: ignore[arg-type]

    yield "files crossed", files
    for axis in entry.axes:
        yield f"lengths of {axis} swapped", first(lambda e, x=axis: _swap(e["axes"][x], 0, 3))
        yield f"a length of {axis} moved", first(lambda e, x=axis: _move(e["axes"][x], 2, 1))
    alike = itertools.combinations(sorted(entry.columns), 2)
    for a, b in alike:
        for what in ("values", "offsets", "dtype", "axis"):
            if getattr(entry.columns[a], what) != getattr(entry.columns[b], what):
                yield (
                    f"{what} of {a} and {b} crossed",
                    first(lambda e, a=a, b=b, w=what: _cross(e, a, b, w)),
                )
    for name, key in (("body", "body"), ("table", "checksums")):
        yield f"{name} shifted", first(lambda e, k=key: _set(e, k, [e[k][0] + 8, e[k][1]]))
    yield "body cut", first(lambda e: _set(e, "body", [e["body"][0], e["body"][1] - 64]))
    yield "blocks", first(lambda e: _set(e, "block_bytes", 2 * e["block_bytes"]))
    yield "size", first(lambda e: _set(e, "bytes", e["bytes"] + 4096))
    yield "generation", first(lambda e: _set(e, "generation", e["generation"] + 1))


def resealed(manifest: Manifest, edit: Edit) -> Manifest:
    """The edited manifest with a digest that fits. Raises `ManifestError` as reading it would."""
    raw = json.loads(manifest.model_dump_json())
    edit(raw)
    try:
        edited = Manifest.model_validate(raw)
        raw["digest"] = edited.content_digest()
    except ValueError as error:
        raise ManifestError(str(error)) from error
    return parse_manifest(raw)


def read(store: ShardStore, manifest: Manifest, verify: bool) -> dict[int, list[bytes]]:
    """Everything of each row, by sample_id."""
    with Batch(store, [manifest], verify=verify) as batch:
        ids = batch.scalars("episode_id")
        return {
            int(row): [
                *(batch.row(name, at).tobytes() for name in READ),
                batch.strings("finish_reason")[at].encode(),
                int(ids[at]).to_bytes(8, "little"),
            ]
            for at, row in enumerate(batch.rows)
        }


@pytest.mark.parametrize("verify", [False, True])
def test_no_edit_reads_wrongly(store: ShardStore, whole: Manifest, verify: bool) -> None:
    expected = read(store, whole, verify)
    wrong, tried, refused = [], 0, 0
    for name, edit in edits(whole):
        tried += 1
        try:
            if read(store, resealed(whole, edit), verify) != expected:
                wrong.append(name)
        except ManifestError:
            refused += 1
    assert wrong == []
    assert tried > 45
    assert refused > 40


def test_edits_are_found_by_the_spill_and_by_other_hosts(
    store: ShardStore, whole: Manifest, tmp_path: Path
) -> None:
    spill = Spill(f"file://{tmp_path}/spill", UID)
    entry = whole.shards[0]
    spill.put(store.path(entry), entry)
    start, length = entry.columns["tokens"].values
    target = tmp_path / "restored"

    def restored(known: ShardEntry) -> bytes:
        target.unlink(missing_ok=True)
        spill.restore(known, target)
        return target.read_bytes()[start : start + length]

    expected = restored(entry)
    tried = refused = 0
    for name, edit in edits(whole):
        try:
            edited = resealed(whole, edit).shards[0]
        except ManifestError:
            continue
        if edited == entry or "shards in another order" in name or edited.file != entry.file:
            continue
        tried += 1
        try:
            assert restored(edited) == expected, name
        except ManifestError:
            refused += 1
        item = Range(entry.file, edited.generation, start, length)
        try:
            proofs = {entry.file: Proof.of(edited)}
            with leased_views(store.directory, [item], proofs) as views:
                assert bytes(views[0]) == expected, name
        except (TransportError, ManifestError):
            refused += 1
    assert refused >= 2 * tried - 3
    assert tried > 10


def test_a_batch_refuses_rows_that_are_there_twice(store: ShardStore, whole: Manifest) -> None:
    twice = manifest_of(whole.shards[0], whole.shards[0]).sealed()
    for given in (lambda: Batch(store, [twice]), lambda: Batch(store, [whole], rows=[1, 1])):
        with pytest.raises(ManifestError, match="twice"):
            given()


def test_a_manifest_is_awaited_until_this_host_sees_the_one_that_was_sealed(
    whole: Manifest, tmp_path: Path
) -> None:
    path = tmp_path / "rollout.json"
    with pytest.raises(ManifestError, match="cannot be read"):
        await_manifest(path, whole.digest, 0.0)
    write_manifest(path, whole.model_copy(update={"key": "an earlier attempt"}))
    with pytest.raises(ManifestError, match="another manifest"):
        await_manifest(path, whole.digest, 0.2)
    soon = threading.Timer(0.3, lambda: write_manifest(path, whole))
    soon.start()
    assert await_manifest(path, whole.digest, 30.0) == whole
    soon.join()
