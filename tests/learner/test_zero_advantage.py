"""Samples without advantage that are left out: the weights are those of an update that computes
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from earl_core.cluster.rpc import same_results
from earl_core.learner.data.zero_advantage import choose, leave_out
from tests.learner import zero_ranks
from tests.learner.helpers import save_model
from tests.learner.launched import launch
from tests.learner.recorded import Recorded
from tests.learner.test_worker_ranks import AGREED, LEARNER, deployment, shards, site
from tests.learner.zero_ranks import ALGORITHMS, MINIBATCHES, batch, difference, state_of, updated

COUNTED = {"tokens", "tokens_trained", "optimizer_steps", "loss", "grad_norm", "clip_fraction"}


@pytest.mark.parametrize("minibatches", MINIBATCHES.values(), ids=MINIBATCHES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_weights_and_moments_are_those_of_an_update_that_computes_all(
    algorithm: str, minibatches: int, tmp_path: Path
) -> None:
    """With a group in each minibatch some have nothing but zeros, and step like the others."""
    save_model("llama", tmp_path)
    computed, wanted = updated(tmp_path, algorithm, minibatches, skip=False)
    skipping, found = updated(tmp_path, algorithm, minibatches, skip=True)
    assert wanted["grad_norm"] > 1e-3
    assert found["optimizer_steps"] == 2 * minibatches
    theirs = state_of(computed)
    for name, value in state_of(skipping).items():
        assert difference(theirs[name], value) < 1e-6, name
    for name in wanted.keys() & COUNTED:
        assert found[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), name
    assert wanted["skipped_tokens_share"] == 0.0
    assert 0.5 < found["skipped_tokens_share"] < 1.0
    assert found["microbatches"] < wanted["microbatches"]
    # The mean is over the tokens that are computed, whatever minibatch they are in.
    assert found["entropy"] == pytest.approx(wanted["entropy"], rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "shapes"), [(2, 4), pytest.param(4, 10, marks=pytest.mark.campaign)]
)
def test_every_mesh_skips_as_one_process_computes(ranks: int, shapes: int, tmp_path: Path) -> None:
    zero_ranks.prepare(tmp_path)
    for found in launch("tests.learner.zero_ranks", "compare", ranks, tmp_path / "ranks"):
        assert len(found) == shapes * 2
        assert not {name: gap for name, gap in found.items() if not gap < 1e-6}


def test_a_sample_is_skipped_for_zeros_at_all_of_its_trained_tokens_alone() -> None:
    samples = batch()
    kept, skipped = leave_out(samples, whole_episodes=False, seed=1, iteration=0)
    out = set(skipped.table[:, 0].tolist())
    zero = {each.sample_id for each in samples if not each.advantages[each.loss_mask == 1].any()}
    assert zero == {*range(8), 9, *range(12, 20)}
    # One of them is measured all the same.
    assert out < zero
    assert len(out) == len(zero) - 1
    assert {each.sample_id for each in kept} == {each.sample_id for each in samples} - out
    assert skipped.tokens == sum(len(each.tokens) for each in samples if each.sample_id in out)


def test_episodes_that_stay_whole_are_skipped_whole_in_any_order() -> None:
    rows = [(n, n // 4, n // 2, 3, n // 2 == 1 and n % 2, 5) for n in range(200)]
    table = np.array(rows, dtype=np.int64)
    first = choose(table, whole_episodes=True, seed=1, iteration=2)
    other = choose(table[::-1], whole_episodes=True, seed=1, iteration=2)
    assert sorted(first.table.tolist()) == sorted(other.table.tolist())
    assert len(first.table) == 2 * (99 - 5)
    assert not np.isin(first.table[:, 2], [1]).any()
    assert (np.unique(first.table[:, 2], return_counts=True)[1] == 2).all()
    drawn = [choose(table, whole_episodes=True, seed=1, iteration=n).table for n in (2, 3)]
    assert drawn[0].tolist() != drawn[1].tolist()


def test_workers_neither_read_nor_score_what_they_skip(tmp_path: Path) -> None:
    recorded = Recorded.make(tmp_path, alike=(1, 2, 4))
    given: dict[str, Any] = {
        "manifests": recorded.references(0), "checkpoint": None, "record": {},
    }  # fmt: skip
    publish = {"policy_version": 1, "dtype": "float32"}
    try:
        recorded.config["algorithm"] = {"policy_loss": "ppo_clip"}
        group = recorded.group(LEARNER, deployment(replicas=2))
        group.call("restore", checkpoint=None, **site(0))
        found = same_results(group.call("update", **given, **site(0)), AGREED)
        own = group.call("publish", directory=str(tmp_path / "own"), **publish, **site(0))
        recorded.config["update"]["zero_advantage"] = "compute"
        alone, context = recorded.alone()
        context.iteration = 0
        wanted = alone.update(**given)
        theirs = alone.publish(directory=str(tmp_path / "theirs"), **publish)
        assert wanted["metrics"]["grad_norm"] > 1e-3
        weights = load_file(own[0]["files"][0]["path"])
        for name, weight in load_file(theirs["files"][0]["path"]).items():
            assert difference(weight, weights[name]) < 1e-6, name
        metrics = found["metrics"]
        for name in ("tokens", "tokens_trained", "optimizer_steps"):
            assert metrics[name] == wanted["metrics"][name]
        # Six episodes of a sample have no advantage, of eight; one of them is measured.
        assert len(shards(recorded, wanted["shards"], "old_logprobs")) == 8
        scored = shards(recorded, found["shards"], "old_logprobs")
        assert len(scored) == 3
        assert {row >> 16 for row in scored} > {6, 7}
        assert 0.4 < metrics["skipped_tokens_share"] < 0.8
        assert "mismatch_mean" in metrics
    finally:
        recorded.close()
