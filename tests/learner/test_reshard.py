"""A live model changes its mesh: exactly, with little memory, and goes on training as before."""

from __future__ import annotations

import pytest
import torch

from earl_core.learner.parallel.mesh import create_mesh
from earl_core.learner.state.reshard import move_state
from tests.learner.cuts import meshes
from tests.learner.slice_ranks import RANKS, policy, results


@pytest.mark.parametrize("ranks", RANKS)
def test_weights_and_optimizer_state_go_through_all_meshes(ranks: int) -> None:
    """Values are compared in the ranks; a hop that needs no other rank moves nothing."""
    for answered in results(ranks):
        hops = answered["reshard"]
        assert len(hops) == len(meshes(ranks)) + 2
        largest = 61 * 32 * 4
        assert max(hop["peak"] for hop in hops) <= 1.1 * largest


@pytest.mark.parametrize("ranks", RANKS)
def test_the_allocator_saw_at_most_one_parameter_more(ranks: int) -> None:
    for answered in results(ranks):
        for hop in answered["memory"]:
            assert hop["seen"] <= 1.1 * hop["largest"], hop
            assert hop["counted"] <= 1.1 * hop["largest"], hop
            assert 2 * hop["seen"] >= hop["counted"], hop


@pytest.mark.parametrize("ranks", RANKS)
def test_steps_between_changes_of_the_mesh_equal_one_process(ranks: int) -> None:
    """fp32, uneven samples dealt to data ranks, a step on every mesh."""
    for difference, steps in (answered["training"] for answered in results(ranks)):
        assert steps >= 4
        assert difference <= 1e-6


def test_another_model_is_refused_before_anything_moves() -> None:
    old, shell = policy(False), policy(False, wide=2)
    before = {name: parameter.clone() for name, parameter in old.named_parameters()}
    with pytest.raises(ValueError, match=r"of another model: \d+ parameters differ"):
        move_state(old, {}, shell.to("meta"), create_mesh())
    for name, parameter in old.named_parameters():
        assert torch.equal(parameter, before[name])
