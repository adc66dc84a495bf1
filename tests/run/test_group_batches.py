"""Groups that were sealed one by one: which of them a run that goes on uses again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from earl_core.dispatch import Manifest
from earl_core.run import RunDirectory
from earl_core.run.group_batches import GroupBatches, misfit
from earl_core.run.group_journal import NAME, SealedGroup
from earl_core.trajectory.samples import rollout_rows
from earl_core.trajectory.schema import GROUP_SCHEMA
from tests.kept import game
from tests.run.test_run_directory import config_in

SIZE = 4


def opened(directory: Path, **sampling: object) -> RunDirectory:
    config = config_in(directory)
    rollout = config.rollout.model_copy(update={"prompts_per_iteration": SIZE, **sampling})
    schedule = config.schedule.model_copy(update={"mode": "stream", "staleness": 1})
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


def sealed(run: RunDirectory, group: int, versions: dict[int, str]) -> SealedGroup:
    entry = run.store.publish(
        stage="collect",
        iteration=group // SIZE,
        rank=group,
        schema=GROUP_SCHEMA,
        rows=rollout_rows([game(group)], GROUP_SCHEMA),
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
    rows = [row for entry in batches.entries(0) for row in entry.row_ids]
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
