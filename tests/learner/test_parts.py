"""A loss counts a role's part of an episode as it counts an episode: against formulas in numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from earl_core.config.algorithm import AlgorithmConfig
from earl_core.dispatch import Batch, ShardStore
from earl_core.learner.data.packing import TrainingSample
from earl_core.learner.data.samples import sample_table, split_table, training_samples
from earl_core.learner.data.zero_advantage import advantage_table
from earl_core.learner.microbatches import Algorithm, Feed
from earl_core.trajectory.samples import Episode, Sample, VersionSpan, rollout_rows
from earl_core.trajectory.schema import ADVANTAGE_SCHEMA, ROLLOUT_SCHEMA
from tests.columns import list_column
from tests.experience.test_experience import sealed

ROLES = [("", "opponent"), ("",), ("planner", "solver", "planner"), ("", "opponent")]
SIZES = {"": 3, "opponent": 30, "planner": 5, "solver": 2}


def told(directory: Path) -> tuple[list[TrainingSample], list[tuple[int, str]], np.ndarray]:
    """Samples of four episodes, the part of each, and the table that chooses those left out. Sides
    are of opposite advantage."""
    chance, episodes, parts = np.random.default_rng(5), [], []
    for number, roles in enumerate(ROLES):
        samples = []
        for role in roles:
            size = SIZES[role]
            sample = Sample(role=role)
            sample.begin_turn([1, 2])
            said = (chance.normal(size=size) * 0.3 - 3).tolist()
            sample.answer([3] * size, said, [VersionSpan(0, 0, size)])
            samples.append(sample)
            parts.append((number, role))
        episodes.append(Episode(number, 0, 0, samples, "done"))
    rows = rollout_rows(episodes)
    values = [
        np.full(2 + SIZES[role], -1.0 if role == "opponent" else 0.5 + number, np.float32)
        for number, role in parts
    ]
    ids = np.array([e << 16 | at for e, roles in enumerate(ROLES) for at in range(len(roles))])
    store = ShardStore(directory, 2**30)
    manifests = [
        sealed(store, "rollout", ROLLOUT_SCHEMA, rows),
        sealed(
            store,
            "advantage",
            ADVANTAGE_SCHEMA,
            {"sample_id": ids, "advantages": list_column(values, "float32")},
        ),
    ]
    with Batch(store, manifests) as batch:
        old = [
            (batch.row("rollout_logprobs", row) + 0.1 * chance.normal()).astype(np.float32)
            for row in range(len(batch))
        ]
        samples = [
            TrainingSample(
                **{
                    **each.__dict__,
                    **{
                        name: np.array(getattr(each, name))
                        for name in ("tokens", "loss_mask", "rollout_logprobs", "advantages")
                    },
                }
            )
            for each in training_samples(batch, [None] * len(batch), old)
        ]
        table = advantage_table(batch)
    return samples, parts, table


@pytest.mark.parametrize(
    ("loss", "correction"), [("policy_gradient", "sequence"), ("gspo", None), ("gspo", "geometric")]
)
@pytest.mark.parametrize("aggregation", ["sequence_mean_token_mean", "sequence_mean_token_sum"])
def test_a_role_weighs_as_an_episode_and_has_ratios_of_its_own(
    tmp_path: Path, loss: str, correction: str | None, aggregation: str
) -> None:
    samples, parts, skipping = told(tmp_path)
    table = sample_table(samples)
    assert (table == skipping[:, :4]).all()
    settings: dict[str, Any] = {"policy_loss": loss, "aggregation": aggregation}
    if correction:
        settings["importance_correction"] = {"level": correction, "cap": 1.3}
    algorithm = Algorithm(AlgorithmConfig.model_validate(settings))
    rows = range(len(samples))
    (minibatch,) = split_table(table, rows, 1, seed=0, iteration=0, epoch=0)
    (fed,) = Feed(torch.device("cpu")).microbatches(samples, [list(rows)])
    of_token = [part for part, each in zip(parts, samples, strict=True) for _ in _trained(each, "")]

    old, rollout, advantages = (
        np.concatenate([_trained(each, name) for each in samples]).astype(np.float64)
        for name in ("old_logprobs", "rollout_logprobs", "advantages")
    )
    # All within the clips of gspo, whose means are of a whole part.
    moved = old + 1e-4 * np.random.default_rng(1).normal(size=len(old))
    logprobs = torch.from_numpy(moved.astype(np.float32)).requires_grad_()
    result = algorithm.evaluate(fed, logprobs, None, minibatch).result
    result.loss.backward()

    expected = np.zeros(len(old))
    for part in set(of_token):
        own = np.array([each == part for each in of_token])
        gap, weight = old[own] - rollout[own], 1.0
        if correction:
            weight = min(np.exp(gap.mean() if correction == "geometric" else gap.sum()), 1.3)
        ratio = np.exp((moved[own] - old[own]).mean()) if loss == "gspo" else 1.0
        size = own.sum() if aggregation == "sequence_mean_token_mean" else 1
        expected[own] = -advantages[own] * ratio * weight / size / len(set(of_token))
    assert np.abs(expected).min() > 0
    np.testing.assert_allclose(logprobs.grad, expected, rtol=1e-4)


def _trained(sample: TrainingSample, name: str) -> np.ndarray:
    return getattr(sample, name or "tokens")[sample.loss_mask == 1]
