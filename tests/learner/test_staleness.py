"""Ages of trained tokens, effective sample sizes, and what a small one stops."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from earl_core.algorithms.importance import ImportanceCorrection
from earl_core.algorithms.mismatch import UpdateRefused
from earl_core.dispatch import Batch, Manifest
from earl_core.learner.data.staleness import age_metrics, importance_metrics
from earl_core.tensors.collectives import Ranks
from earl_core.trajectory.samples import Episode, Sample, VersionSpan, rollout_rows
from earl_core.trajectory.schema import ROLLOUT_SCHEMA
from tests.learner.helpers import random_samples
from tests.learner.recorded import Recorded


def test_ages_are_those_of_the_tokens_that_are_trained(tmp_path: Path) -> None:
    recorded = Recorded.make(tmp_path)
    episodes = []
    for number, versions in enumerate([(3, 3), (3,), (1, 2), (0,)]):
        sample = Sample()
        for turn, version in enumerate(versions):
            sample.begin_turn([4, 5])
            count = 4 + turn
            sample.answer([6] * count, [-1.0] * count, [VersionSpan(version, 0, count)])
        episodes.append(Episode(number, 0, 0, [sample], "done"))
    shard = recorded.store.publish(
        stage="aged", iteration=0, rank=0, schema=ROLLOUT_SCHEMA, rows=rollout_rows(episodes)
    )
    aged = Manifest(run="r", iteration=0, stage="aged", key="", policy_version=3, shards=(shard,))
    with Batch(recorded.store, [aged]) as batch:
        found = age_metrics(batch, 3, Ranks(None))
    assert found["age_mean"] == pytest.approx((4 * 2 + 5 * 1 + 4 * 3) / 26)
    assert (found["age_p95"], found["age_max"]) == (3.0, 3.0)
    assert age_metrics(None, 3, Ranks(None)) == {}
    recorded.close()


@pytest.mark.parametrize("level", ["token", "geometric"])
def test_sample_sizes_are_those_of_a_plain_loop(level: str) -> None:
    samples = random_samples(9, samples_per_episode=2)
    correction = ImportanceCorrection(level=level, cap=1.2)  # type: ignore[arg-type]
    weights: list[float] = []
    of: dict[int, list[float]] = {}
    for sample in samples:
        assert sample.old_logprobs is not None
        for at in np.flatnonzero(sample.loss_mask):
            ratio = float(sample.old_logprobs[at]) - float(sample.rollout_logprobs[at])
            of.setdefault(sample.episode_id, []).append(ratio)
    for episode, ratios in of.items():
        if level == "geometric":
            ratios = [sum(ratios) / len(ratios)] * len(ratios)
        of[episode] = [min(math.exp(ratio), 1.2) for ratio in ratios]
        weights += of[episode]
    means = [sum(each) / len(each) for each in of.values()]
    found = importance_metrics(samples, correction, Ranks(None))
    for name, values in (("sample", weights), ("episode", means)):
        wanted = sum(values) ** 2 / sum(value**2 for value in values) / len(values)
        assert found[f"importance_{name}_share"] == pytest.approx(wanted, rel=1e-5)
    assert importance_metrics([], correction, Ranks(None)) == {}


def test_a_small_sample_stops_the_update_before_its_first_step(tmp_path: Path) -> None:
    recorded = Recorded.make(tmp_path, least_sample_size=0.999, small_sample="stop")
    worker, context = recorded.alone()
    context.iteration = 0
    before = worker._digest()
    with pytest.raises(UpdateRefused, match=r"effective sample size of .* before its first step"):
        worker.update(recorded.references(0), None, {})
    assert worker._digest() == before
    assert not worker._dirty
    recorded.close()
