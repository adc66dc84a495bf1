"""Iterations that imitate: the loss, gradients and weights of a plain loop over the same chats."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from earl_core.learner.data.packing import TrainingSample
from tests.learner import imitation_ranks
from tests.learner.launched import launch
from tests.learnt import SMALLEST_NORM


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = tmp_path_factory.mktemp("imitation")
    imitation_ranks.prepare(scratch)
    return scratch


@pytest.mark.parametrize("ranks", [1, 4])
def test_imitation_equals_a_plain_loop_over_the_same_chats(ranks: int, computed: Path) -> None:
    found = launch("tests.learner.imitation_ranks", "compare", ranks, computed / str(ranks))
    for meshes in found:
        assert len(meshes) == len(imitation_ranks.MESHES[ranks])
        for mesh, numbers in meshes.items():
            assert numbers["smallest norm"] > SMALLEST_NORM
            assert numbers["fell"] > 0.1
            assert numbers["shared"] > 0.1
            for name in ("loss", "norm", "weights"):
                assert numbers[name] <= 1e-6, (mesh, name, numbers)


def test_the_first_iteration_that_plays_begins_with_a_fresh_optimizer(
    computed: Path, tmp_path: Path
) -> None:
    """Also after a resume: as a run does that begins with the weights of one that imitates."""
    chats = imitation_ranks.samples(computed / "model")
    imitates = imitation_ranks.learner_of(computed / "model")
    for iteration in range(imitation_ranks.STEPS):
        assert imitates.update(chats, iteration=iteration)["grad_norm"] > SMALLEST_NORM
    imitates.save(tmp_path / "imitated", {})
    killed = imitation_ranks.learner_of(computed / "model")
    killed.restore(tmp_path / "imitated")
    begins = imitation_ranks.learner_of(tmp_path / "imitated" / "policy", imitation=None)
    found = []
    for first, learner in ((3, imitates), (3, killed), (0, begins)):
        for iteration in (first, first + 1):
            assert learner.update(_played(chats), iteration=iteration)["grad_norm"] > SMALLEST_NORM
        found.append(learner.named_weights())
    for name, weight in found[0].items():
        assert torch.equal(weight, found[1][name])
        assert torch.equal(weight, found[2][name])


def test_iterations_that_play_have_a_schedule_and_an_objective_of_their_own(
    computed: Path,
) -> None:
    """What they need is what it was; the warm-up begins with the first of them."""
    learner = imitation_ranks.learner_of(computed / "model")
    chats = imitation_ranks.samples(computed / "model")
    assert learner.update(chats, iteration=2)["learning_rate"] == imitation_ranks.RATE
    with pytest.raises(ValueError, match="has no advantages"):
        learner.update(chats, iteration=3)
    metrics = learner.update(_played(chats), iteration=3)
    assert metrics["learning_rate"] == 1.0 / 4
    assert {"loss/kl", "mismatch_mean", "ratio_max"} <= metrics.keys()


def _played(chats: list[TrainingSample]) -> list[TrainingSample]:
    """The same tokens, as if the policy had played them."""
    return [
        dataclasses.replace(
            each,
            advantages=np.ones(len(each.tokens), np.float32),
            old_logprobs=each.rollout_logprobs,
            reference_logprobs=each.rollout_logprobs,
        )
        for each in chats
    ]
