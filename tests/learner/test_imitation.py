"""Iterations that imitate: the loss, gradients and weights of a plain loop over the same chats."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

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


def test_iterations_that_play_have_a_schedule_and_an_objective_of_their_own(
    computed: Path,
) -> None:
    """What they need is what it was; the warm-up begins with the first of them."""
    learner = imitation_ranks.learner_of(computed / "model")
    chats = imitation_ranks.samples(computed / "model")
    assert learner.update(chats, iteration=2)["learning_rate"] == imitation_ranks.RATE
    with pytest.raises(ValueError, match="has no advantages"):
        learner.update(chats, iteration=3)
    played = [
        dataclasses.replace(
            each,
            advantages=np.ones(len(each.tokens), np.float32),
            old_logprobs=each.rollout_logprobs,
            reference_logprobs=each.rollout_logprobs,
        )
        for each in chats
    ]
    metrics = learner.update(played, iteration=3)
    assert metrics["learning_rate"] == 1.0 / 4
    assert {"loss/kl", "mismatch_mean", "ratio_max"} <= metrics.keys()
