"""Groups that were sealed one by one: which of them a run that goes on uses again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from earl_core.config.schedule import ReplayConfig
from earl_core.dispatch import Manifest, PoolFull
from earl_core.run import RunDirectory
from earl_core.run.group_batches import GroupBatches, misfit
from earl_core.run.group_journal import NAME, SealedGroup
from earl_core.run.replay import new_rows, replay_metrics, replay_outputs, replayed_groups
from earl_core.trajectory.samples import rollout_rows
from earl_core.trajectory.schema import GROUP_SCHEMA, ROLLOUT_SCHEMA
from tests.kept import game
from tests.run.test_run_directory import config_in

SIZE = 4


def opened(
    directory: Path,
    replay: ReplayConfig | None = None,
    dispatch: dict[str, object] | None = None,
    **sampling: object,
) -> RunDirectory:
    place = {"directory": str(directory / "shm"), **(dispatch or {})}
    config = config_in(directory, dispatch=place)
    rollout = config.rollout.model_copy(update={"prompts_per_iteration": SIZE, **sampling})
    mode = {"mode": "stream", "staleness": 1, "replay": replay}
    schedule = config.schedule.model_copy(update=mode)
    return RunDirectory.open(config.model_copy(update={"rollout": rollout, "schedule": schedule}))


def publish(run: RunDirectory, version: int, digest: str) -> None:
    """Seal that the run has published weights."""
    iteration, stage = (
        run.versions.publication(version) if not version else (version - 1, "publish")
    )
    run.seal(
        Manifest(
            run=run.uid,
            iteration=iteration,
            stage=stage,
            key="k",
            policy_version=version,
            outputs={"digest": digest},
        )
    )


def sealed(
    run: RunDirectory, group: int, versions: dict[int, str], schema: Any = GROUP_SCHEMA
) -> SealedGroup:
    entry = run.store.publish(
        stage="collect",
        iteration=group // SIZE,
        rank=group,
        schema=schema,
        rows=rollout_rows([game(group)], schema),
    )
    return SealedGroup(
        group=group,
        key=GroupBatches(run).key(group // SIZE),
        shards=(entry,),
        tally={"episodes": 1},
        versions=versions,
    )


def numbers(groups: Sequence[SealedGroup]) -> list[int]:
    return [each.group for each in groups]


def test_a_batch_is_complete_whoever_ends_first_and_names_each_row_once(tmp_path: Path) -> None:
    run = opened(tmp_path)
    batches = GroupBatches(run)
    for group in (5, 2, 0, 3):
        batches.seal([sealed(run, group, {0: "a"})])
        assert not batches.is_complete(0)
    assert numbers(batches.of(0)) == [0, 2, 3]
    batches.seal([sealed(run, 1, {0: "a"})])
    assert batches.is_complete(0)
    assert not batches.is_complete(1)
    rows = [row for entry in batches.entries(batches.of(0)) for row in entry.row_ids]
    assert rows == [group << 16 for group in (0, 1, 2, 3)]
    with pytest.raises(RuntimeError, match="group 1 is sealed already"):
        batches.seal([sealed(run, 1, {0: "a"})])
    run.close()


def test_a_run_that_goes_on_plays_anew_what_it_cannot_vouch_for(tmp_path: Path) -> None:
    run = opened(tmp_path)
    publish(run, 0, "a")
    publish(run, 1, "b")
    batches = GroupBatches(run)
    batches.seal([sealed(run, 0, {0: "a"}), sealed(run, 1, {0: "a", 1: "b"})])
    batches.seal([sealed(run, 2, {1: "other weights of that number"})])
    batches.seal([sealed(run, 3, {2: "weights that nobody published"})])
    batches.seal([sealed(run, 4, {0: "a"}), sealed(run, 9, {0: "older than the bound"})])
    batches.seal([sealed(run, 5, {0: "a"}), sealed(run, 6, {1: "b"})])
    batches.play_anew(batches.of(1)[1:2])
    lost = batches.of(1)[1].shards[0]
    assert run.store.release(lost)
    run.store.pool.trim()
    shard_of_nobody = sealed(run, 7, {0: "a"}).shards[0]
    run.close()

    again = opened(tmp_path)
    batches = GroupBatches(again)
    usable = {0, 1, 4}
    assert {group for group in range(12) if group in batches} == usable
    files = {path.name for path in again.store.directory.glob("*.arrow")}
    assert shard_of_nobody.file not in files
    kept = {entry.file for k in (0, 1) for group in batches.of(k) for entry in group.shards}
    assert {name for name in files if "-collect-" in name} == kept
    # The journal says so: the next one finds it at once.
    assert len((again.path / NAME).read_text().splitlines()) == 8 + 1 + 4
    assert {g for g in range(12) if g in GroupBatches(again)} == usable
    again.close()


def test_groups_of_other_settings_are_played_anew(tmp_path: Path) -> None:
    run = opened(tmp_path)
    publish(run, 0, "a")
    GroupBatches(run).seal([sealed(run, 0, {0: "a"})])
    run.close()
    run = opened(tmp_path, temperature=0.5)
    assert 0 not in GroupBatches(run)
    run.close()


def test_a_batch_is_collected_again_where_its_versions_are_too_old_or_others(
    tmp_path: Path,
) -> None:
    run = opened(tmp_path)
    publish(run, 0, "a")
    publish(run, 1, "b")
    batch = Manifest(run=run.uid, iteration=1, stage="collect", key="k", policy_version=1)

    def collected(iteration: int, versions: dict[str, str]) -> Manifest:
        return batch.model_copy(update={"iteration": iteration, "outputs": {"versions": versions}})

    assert misfit(run, collected(1, {"0": "a", "1": "b"})) == ""
    assert "older than schedule.staleness" in misfit(run, collected(2, {"0": "a", "1": "b"}))
    assert "not the run's any more" in misfit(run, collected(1, {"0": "a", "1": "other"}))
    assert "not the run's any more" in misfit(run, collected(2, {"2": "nobody's"}))
    batches = GroupBatches(run)
    batches.seal([sealed(run, 4, {0: "a", 1: "b"}), sealed(run, 5, {0: "a"})])
    # The update that makes version 1 is done again.
    publish(run, 1, "other")
    batches.settle(1)
    assert numbers(batches.of(1)) == [5]
    run.close()


REPLAY = ReplayConfig(share=0.6, max_age=2)
"""Six groups beside four."""


def collected(run: RunDirectory, batches: GroupBatches, iteration: int) -> Manifest:
    """Seal the batch of an iteration, as `collect` does."""
    own, again = batches.of(iteration), batches.replayed(iteration)
    versions = {str(v): digest for each in own for v, digest in each.versions.items()}
    return run.seal(
        Manifest(
            run=run.uid,
            iteration=iteration,
            stage="collect",
            key="k",
            policy_version=iteration,
            shards=batches.entries([*own, *again]),
            outputs={"versions": versions, **replay_outputs(run.config, again)},
        )
    )


def end(run: RunDirectory, iteration: int) -> None:
    run.checkpoint_path(iteration).mkdir()
    run.mark_stable(iteration)


def test_groups_are_trained_again_the_newest_first_until_they_are_too_old(tmp_path: Path) -> None:
    run = opened(tmp_path, REPLAY)
    publish(run, 0, "a")
    batches = GroupBatches(run)
    batches.seal([sealed(run, group, {0: "a"}) for group in range(4)])
    batches.seal([SealedGroup(group=5, key=batches.key(1), tally={"failed": 2})])
    batches.seal([sealed(run, 4, {0: "a"}), sealed(run, 9, {1: "b"})])
    assert batches.replayed(0) == []
    collected(run, batches, 0)
    publish(run, 1, "b")
    batches.seal([sealed(run, 6, {0: "a", 1: "b"}), sealed(run, 7, {1: "b"})])
    # Group 5 has no row: the share is of three new ones.
    again = batches.replayed(1)
    assert numbers(again) == [3, 2, 1, 0]
    assert replay_metrics(run.config, again, 1, 8, own=3)["replayed_share"] == 4 / 7
    sealed_1 = collected(run, batches, 1)
    assert replayed_groups(sealed_1) == (0, 1, 2, 3)
    end(run, 1)
    publish(run, 2, "c")
    batches.seal([sealed(run, group, {2: "c"}) for group in (8, 10, 11)])
    batches.settle(2)
    # Group 9 is of this batch; group 5 has no row. Six at most, and none too old.
    assert numbers(batches.replayed(2)) == [7, 6, 4, 3, 2, 1]
    assert batches.replayed(3) == []
    batches.seal([sealed(run, group, {2: "c"}) for group in range(12, 16)])
    assert numbers(batches.replayed(3)) == [11, 10, 9, 8, 7]
    run.store.release(batches.replayed(2)[0].shards[0])
    run.store.pool.trim()
    assert numbers(batches.replayed(2)) == [6, 4, 3, 2, 1, 0]
    manifest = collected(run, batches, 2)
    rows = [entry.row_ids[0] >> 16 for entry in manifest.shards]
    assert rows == [8, 9, 10, 11, 6, 4, 3, 2, 1, 0]
    assert [entry.row_ids[0] >> 16 for entry in new_rows(manifest).shards] == [8, 9, 10, 11]
    run.close()

    following = opened(tmp_path, REPLAY)
    batches = GroupBatches(following)
    # What is trained for good and lost is not played anew.
    assert batches.anew == 0
    assert numbers(batches.replayed(2)) == [6, 4, 3, 2, 1, 0]
    assert misfit(following, manifest) == ""
    assert len(list(following.store.directory.glob("*.arrow"))) == 4 + 2 + 4 + 4
    following.close()
    for other in (None, ReplayConfig(share=0.6, max_age=3)):
        changed = opened(tmp_path, other)
        assert misfit(changed, manifest) == "schedule.replay has changed"
        changed.close()


def test_shards_of_groups_go_when_no_later_iteration_may_train_them(tmp_path: Path) -> None:
    run = opened(tmp_path, REPLAY)
    batches = GroupBatches(run)
    for k in range(5):
        publish(run, k, str(k))
        batches.settle(k)
        batches.seal([sealed(run, group, {k: str(k)}) for group in range(k * SIZE, (k + 1) * SIZE)])
        named = {entry.file for entry in collected(run, batches, k).shards}
        there = {path.name for path in run.store.directory.glob("*.arrow")}
        assert named <= there
        end(run, k)
        there = {path.name for path in run.store.directory.glob("*.arrow")}
        # Those of the next two iterations' oldest, and of no one else.
        first = max(0, k + 1 - REPLAY.max_age) * SIZE
        own = {e.file for g in range(first, (k + 1) * SIZE) for e in batches._known[g].shards}
        assert there == own
    run.close()


def test_groups_of_other_columns_are_not_trained_again(tmp_path: Path) -> None:
    run = opened(tmp_path, REPLAY)
    batches = GroupBatches(run)
    old = [sealed(run, g, {0: "a"}, ROLLOUT_SCHEMA if g == 2 else GROUP_SCHEMA) for g in range(4)]
    batches.seal([*old, *(sealed(run, group, {0: "a"}) for group in range(4, 8))])
    assert numbers(batches.replayed(1)) == [3, 1, 0]
    assert len(collected(run, batches, 1).shards) == 4 + 3
    run.close()


def test_an_old_group_for_which_there_is_no_room_is_not_trained_again(tmp_path: Path) -> None:
    """The spill has it. One that was not trained yet is needed, and says that memory is full."""
    spill = {"durability": "spill", "spill_url": f"file://{tmp_path}/spill"}
    run = opened(tmp_path, REPLAY, {**spill, "max_bytes": 4 * 2**20, "wait_seconds": 0.3})
    publish(run, 0, "a")
    batches = GroupBatches(run)
    batches.seal([sealed(run, group, {0: "a"}) for group in range(8)])
    assert run.spill is not None
    run.spill.submit([entry for each in batches.of(0) for entry in each.shards])
    assert run.spill.drain(60)
    for each in batches.of(0)[2:]:
        run.store.release(each.shards[0])
    run.store.pool.trim()
    taken = []
    for size in (2**20, batches.of(0)[3].shards[0].bytes):
        with suppress(PoolFull):
            while True:
                taken.append(run.store.pool.acquire(size))
    assert numbers(batches.replayed(1)) == [1, 0]
    with pytest.raises(PoolFull):
        assert 0 in GroupBatches(run)
    end(run, 0)
    later = GroupBatches(run)
    assert [group for group in range(8) if group in later] == [0, 1, 4, 5, 6, 7]
    assert later.anew == 0
    for segment in taken:
        segment.abandon()
    run.store.pool.trim()
    # Room is looked for anew before each batch.
    assert numbers(batches.replayed(1)) == [1, 0]
    batches.settle(1)
    assert numbers(batches.replayed(1)) == [3, 2, 1, 0]
    run.close()
