"""Copies made in the background, and the runs that resume from them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from earl_core.config import RunConfig
from earl_core.dispatch import Batch, Manifest, ManifestError, ShardEntry, ShardStore
from earl_core.dispatch.spill.spiller import Spiller
from earl_core.run import RunDirectory
from tests.dispatch.spilled import UID, columns, row, spilled, written


@pytest.fixture
def make_spiller(store: ShardStore) -> Iterator[Callable[[str], Spiller]]:
    made: list[Spiller] = []

    def make(url: str) -> Spiller:
        made.append(Spiller(url, UID, store.directory))
        return made[-1]

    yield make
    for spiller in made:
        spiller.close(5)


def test_shards_are_copied_in_the_background_restored_and_released(
    store: ShardStore, tmp_path: Path, make_spiller: Callable[[str], Spiller]
) -> None:
    entries = [written(store, columns(8, 5_000, seed), f"s{seed}") for seed in range(3)]
    url = f"file://{tmp_path}/spill"
    spiller = make_spiller(url)
    assert spiller.lag_bytes == 0
    spiller.submit(entries)
    assert spiller.drain(60)
    assert spiller.lag_bytes == 0
    assert spiller.spilled_bytes == sum(entry.bytes for entry in entries)
    before = store.path(entries[1]).read_bytes()
    store.release(entries[1])
    spiller.restore(entries[1], 60)
    assert store.path(entries[1]).read_bytes() == before
    spiller.release([entries[0].file])
    assert spiller.drain(60)
    with pytest.raises(ManifestError):
        spiller.restore(entries[0], 60)
    assert spilled(url, UID) == sorted(entry.file for entry in entries[1:])
    spiller.remove()
    assert spilled(url, UID) == []


def test_an_outage_is_one_warning_and_is_made_up_for(
    store: ShardStore,
    tmp_path: Path,
    make_spiller: Callable[[str], Spiller],
    caplog: pytest.LogCaptureFixture,
) -> None:
    entries = [written(store, columns(4, 50, seed), f"s{seed}") for seed in range(4)]
    blocked = tmp_path / "spill"
    blocked.write_text("a file where the folder should be")
    spiller = make_spiller(f"file://{blocked}")
    spiller.submit(entries[:3])
    assert not spiller.drain(60)
    assert spiller.lag_bytes == sum(entry.bytes for entry in entries[:3])
    assert sum("nothing is lost" in record.message for record in caplog.records) == 1
    for entry in entries:
        store.verify(entry, checksum=True)
    blocked.unlink()
    spiller.submit(entries[3:])
    assert spiller.drain(60)
    assert spiller.lag_bytes == 0
    assert len(spilled(f"file://{blocked}", UID)) == 4


def test_a_killed_copier_is_replaced(
    store: ShardStore, tmp_path: Path, make_spiller: Callable[[str], Spiller]
) -> None:
    entries = [written(store, columns(4, 50, seed), f"s{seed}") for seed in range(2)]
    spiller = make_spiller(f"file://{tmp_path}/spill")
    spiller.submit(entries[:1])
    assert spiller.drain(60)
    process = spiller._process
    assert process is not None
    os.kill(process.pid, 9)
    process.wait()
    deadline = time.monotonic() + 60
    while spiller._process is process and time.monotonic() < deadline:
        time.sleep(0.01)
    spiller.submit(entries[1:])
    assert spiller.drain(60)
    assert len(spilled(f"file://{tmp_path}/spill", UID)) == 2


def configuration(tmp_path: Path, url: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "run",
            "iterations": 1,
            "runs_directory": str(tmp_path / "runs"),
            "model": {"path": "nowhere"},
            "environment": {"name": "tic_tac_toe"},
            "rollout": {"prompts_per_iteration": 4, "group_size": 4, "max_turns": 5},
            "dispatch": {
                "directory": str(tmp_path / "shm"),
                "durability": "spill",
                "spill_url": url,
            },
        }
    )


def sealed(run: RunDirectory, entry: ShardEntry) -> Manifest:
    return run.seal(
        Manifest(
            run=run.uid, iteration=0, stage="rollout", key="k", policy_version=0, shards=(entry,)
        )
    )


@pytest.mark.parametrize("url", ["file", "s3"], indirect=True)
def test_a_resumed_run_gets_lost_shards_back_and_a_finished_one_leaves_nothing(
    tmp_path: Path, url: str
) -> None:
    config = configuration(tmp_path, url)
    given = columns(6, 4_000)
    run = RunDirectory.open(config)
    entry = written(run.store, given)
    manifest = sealed(run, entry)
    run.close()
    run.store.remove()
    resumed = RunDirectory.open(config)
    found = resumed.sealed(0, "rollout", "k")
    assert found is not None
    assert found.digest == manifest.digest
    with Batch(resumed.store, [found], verify=True) as batch:
        np.testing.assert_array_equal(batch.row("tokens", 3), row(given, "tokens", 3))
    assert resumed.spill is not None
    assert resumed.spill.drain(60)
    assert spilled(url, resumed.uid) == [entry.file]
    resumed.mark_stable(0)
    assert resumed.spill.drain(60)
    assert spilled(url, resumed.uid) == []
    sealed(resumed, written(resumed.store, given, "later"))
    resumed.finish()
    assert spilled(url, resumed.uid) == []
    resumed.close()


def test_a_resume_spills_what_the_last_attempt_could_not(tmp_path: Path) -> None:
    config = configuration(tmp_path, f"file://{tmp_path}/spill")
    (tmp_path / "spill").write_text("in the way")
    run = RunDirectory.open(config)
    entry = written(run.store, columns(6, 400))
    sealed(run, entry)
    run.close()
    (tmp_path / "spill").unlink()
    resumed = RunDirectory.open(config)
    assert resumed.sealed(0, "rollout", "k") is not None
    assert resumed.spill is not None
    assert resumed.spill.drain(60)
    assert spilled(f"file://{tmp_path}/spill", resumed.uid) == [entry.file]
    resumed.finish()
    resumed.close()


def test_a_shard_lost_in_both_places_repeats_its_stage(tmp_path: Path) -> None:
    config = configuration(tmp_path, f"file://{tmp_path}/spill")
    run = RunDirectory.open(config)
    entry = written(run.store, columns(6, 400))
    sealed(run, entry)
    assert run.spill is not None
    assert run.spill.drain(60)
    run.spill.release([entry.file])
    run.close()
    run.store.remove()
    resumed = RunDirectory.open(config)
    assert resumed.sealed(0, "rollout", "k") is None
    assert any("not usable" in line["event"] for line in resumed.ledger())
    resumed.finish()
    resumed.close()
