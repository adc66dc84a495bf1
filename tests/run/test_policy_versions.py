"""Which policy version an iteration plays, trains and makes, by what a run has sealed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earl_core.dispatch import Manifest, ManifestError
from earl_core.run import RunDirectory
from earl_core.run.policy_versions import PolicyVersions, assigned, carried
from earl_core.run.staleness import note_change
from tests.run.test_run_directory import config_in


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.open(config_in(tmp_path))


def sealed(run: RunDirectory, iteration: int, stage: str, version: int, **outputs: Any) -> Manifest:
    return run.seal(
        Manifest(
            run=run.uid,
            iteration=iteration,
            stage=stage,
            key="k",
            policy_version=version,
            outputs=outputs,
        )
    )


def publish(run: RunDirectory, iteration: int, version: int, stage: str = "publish") -> Manifest:
    return sealed(run, iteration, stage, version, weights={"policy_version": version})


def test_what_is_not_sealed_has_the_versions_that_are_assigned(run: RunDirectory) -> None:
    assert run.versions.before(0) == 0
    assert run.versions.update(4) == assigned(4) == (4, 5)
    assert run.versions.played(5) == run.versions.before(5) == 5
    assert run.versions.maker(5) is None
    assert run.versions.publication(0) == (0, "initial")
    with pytest.raises(ManifestError, match="policy version 5"):
        run.versions.publication(5)


def test_the_seal_of_an_update_says_what_it_made(run: RunDirectory) -> None:
    # As of a run whose first iterations made no version.
    for iteration, (trained, made) in enumerate([(0, 0), (0, 1), (1, 2)]):
        sealed(run, iteration, "update", trained, made=made)
    versions = PolicyVersions(run.path)
    assert versions.update(2) == (1, 2)
    assert versions.before(3) == versions.played(3) == 2
    assert [versions.maker(version) for version in (1, 2, 3)] == [1, 2, None]
    assert versions.publication(2) == (2, "publish")
    names = {stage: versions.of_stage(2, stage) for stage in ("rollout", "update", "publish")}
    assert names == {"rollout": 1, "update": 1, "publish": 2}
    assert versions.of_stage(2, "evaluation") == 1
    run.checkpoint_path(2).mkdir()
    run.mark_stable(2)
    assert '"policy_version": 2' in (run.checkpoint_path(2) / "STABLE").read_text()


def test_an_update_of_an_older_release_names_what_it_trained_only(run: RunDirectory) -> None:
    sealed(run, 3, "update", 3)
    assert run.versions.update(3) == (3, 4)
    assert run.versions.maker(4) == 3
    path = run.stage_path(3, "update")
    path.write_text(path.read_text()[:-20])
    assert run.versions.update(3) == (3, 4)


def test_published_weights_are_found_by_the_version_that_they_carry(run: RunDirectory) -> None:
    publish(run, 0, 0, "initial")
    for iteration in range(3):
        # Older releases named the version that the step began with.
        publish(run, iteration, iteration + 1)
    sealed(run, 3, "publish", 3)
    assert [carried(each) for each in run.versions.publications()] == [3, 2, 1, 0]


@settings(max_examples=25, deadline=None)
@given(
    first=st.integers(0, 7),
    changes=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 7)), max_size=3),
)
def test_a_changed_staleness_asks_for_no_version_that_was_not_kept(
    first: int, changes: list[tuple[int, int]]
) -> None:
    """Each rollout plays the version that its staleness says, or a newer one while the former
    staleness has kept no such old one; and never one that is older than the rollout before it."""
    over = [(0, first)]
    for since, staleness in sorted(dict(changes).items()):
        over.append((since, staleness))
    versions = PolicyVersions(Path("/nowhere"), over)
    played = [versions.played(iteration) for iteration in range(40)]
    assert played == sorted(played)
    for iteration, version in enumerate(played):
        since, staleness = max(each for each in over if each[0] <= iteration)
        wanted = max(0, iteration - staleness)
        assert wanted <= version <= iteration
        # The oldest that the checkpoint before the change has beside it.
        assert version in (wanted, PolicyVersions(Path("/nowhere"), over[:-1]).played(since)) or (
            len(over) > 2
        )
        kept = versions.to_play(iteration)
        later = {versions.played(each) for each in range(iteration + 1, 40)}
        assert {each for each in later if each <= iteration} <= set(kept)


def test_a_changed_staleness_counts_from_the_first_iteration_that_is_not_stable(
    tmp_path: Path,
) -> None:
    def opened(staleness: int) -> RunDirectory:
        stale = {"schedule": {"staleness": staleness}, "algorithm": {"policy_loss": "dppo"}}
        return RunDirectory.open(config_in(tmp_path, iterations=5, **stale))

    run = opened(0)
    run.store_config()
    for iteration in (0, 1):
        run.checkpoint_path(iteration).mkdir()
        run.mark_stable(iteration)
    sealed(run, 2, "rollout", 2)
    sealed(run, 3, "rollout", 3)
    run.close()
    raised = opened(1)
    assert raised.versions.staleness == ((0, 0), (2, 1))
    assert [raised.versions.played(k) for k in range(5)] == [0, 1, 2, 2, 3]
    note_change(raised)
    told = {
        line["iteration"]: line["event"] for line in raised.ledger() if "stale" in line["event"]
    }
    assert told == {
        2: "schedule.staleness is 1 now: policy version 2 still fits",
        3: "schedule.staleness is 1 now: played again by policy version 2, not 3",
    }
    raised.store_config()
    raised.close()
    again = opened(1)
    note_change(again)
    assert again.versions.staleness == ((0, 0), (2, 1))
    assert sum("stale" in line["event"] for line in again.ledger()) == 2
    again.close()
    lowered = opened(0)
    assert lowered.versions.staleness == ((0, 0),)
    lowered.close()
