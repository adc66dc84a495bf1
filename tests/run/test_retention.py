"""What a run keeps is what the rest of it needs, whatever its length and its staleness."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from earl_core.dispatch import Manifest
from earl_core.run.policy_versions import carried
from earl_core.run.retention import (
    first_kept,
    keeps_shards,
    keeps_weights,
    kept_checkpoints,
    kept_weights,
)

NUMBERS = st.integers(0, 30)


def manifest(iteration: int, stage: str = "rollout", version: int | None = None) -> Manifest:
    weights = {} if version is None else {"weights": {"policy_version": version}}
    return Manifest(
        run="r", iteration=iteration, stage=stage, key="k", policy_version=0, outputs=weights
    )


@given(iteration=NUMBERS, covered=st.integers(-1, 30))
def test_shards_stay_until_a_checkpoint_covers_them(iteration: int, covered: int) -> None:
    kept = keeps_shards(manifest(iteration), covered)
    assert kept == (iteration not in range(covered + 1))
    # What was released once is needed never again.
    assert kept or not keeps_shards(manifest(iteration), covered + 1)


@given(iteration=NUMBERS, covered=st.integers(-1, 30), again=st.integers(0, 9))
def test_shards_that_are_trained_again_stay_so_much_longer(
    iteration: int, covered: int, again: int
) -> None:
    """What a group's last iteration reads is there until a checkpoint covers it."""
    for stage in ("collect", "reward"):
        kept = keeps_shards(manifest(iteration, stage), covered, again)
        assert kept == any(k > covered for k in range(iteration, iteration + again + 1))
        if kept:
            assert iteration >= first_kept(covered + 1, again)
    assert keeps_shards(manifest(iteration, "advantage"), covered, again) == (iteration > covered)


@given(iteration=NUMBERS, staleness=st.integers(0, 7), lost=st.integers(0, 3))
def test_weights_stay_for_as_long_as_a_rollout_to_come_plays_them(
    iteration: int, staleness: int, lost: int
) -> None:
    """After an iteration that published; `lost` later ones are done again."""
    newest = iteration + 1
    oldest = max(0, newest - staleness)
    published = [manifest(k, "publish", k + 1) for k in range(newest + lost)][::-1]
    published.append(manifest(0, "initial", 0))
    kept = {carried(each) for each in kept_weights(published, oldest, newest)}
    assert kept == {max(0, k - staleness) for k in range(newest, newest + staleness + 1)}
    assert len(kept) <= staleness + 1
    assert kept == {carried(each) for each in published if keeps_weights(each, oldest, newest)}


@given(
    stable=st.lists(NUMBERS, unique=True).map(sorted),
    keep_last=st.integers(1, 5),
    best=st.none() | NUMBERS,
)
def test_the_last_checkpoints_and_the_best_stay(
    stable: Sequence[int], keep_last: int, best: int | None
) -> None:
    kept = kept_checkpoints(stable, keep_last, best)
    assert kept >= set(stable[-1:])
    assert len(kept - {best}) <= keep_last
    assert all(each in kept for each in stable if each == best)
