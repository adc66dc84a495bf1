"""A live model changes its mesh: exactly, with little memory, and goes on training as before."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import nn

from earl_core.learner.parallel.mesh import create_mesh
from earl_core.learner.state.reshard import move_state
from earl_core.tensors.collectives import Ranks
from tests.learner.cuts import meshes
from tests.learner.slice_ranks import policy
from tests.learner.slice_results import RANKS, Slices


@pytest.mark.parametrize("ranks", RANKS)
def test_weights_and_optimizer_state_go_through_all_meshes(ranks: int, slices: Slices) -> None:
    """Values are compared in the ranks; a hop that needs no other rank moves nothing."""
    for answered in slices.results(ranks):
        hops = answered["reshard"]
        assert len(hops) == len(meshes(ranks)) + 2
        largest = 61 * 32 * 4
        assert max(hop["peak"] for hop in hops) <= 1.1 * largest


@pytest.mark.parametrize("ranks", RANKS)
def test_the_allocator_saw_at_most_one_parameter_more(ranks: int, slices: Slices) -> None:
    for answered in slices.results(ranks):
        for hop in answered["memory"]:
            assert hop["seen"] <= 1.1 * hop["largest"], hop
            assert hop["counted"] <= 1.1 * hop["largest"], hop
            assert 2 * hop["seen"] >= hop["counted"], hop


@pytest.mark.parametrize("ranks", RANKS)
def test_steps_between_changes_of_the_mesh_equal_one_process(ranks: int, slices: Slices) -> None:
    """fp32, uneven samples dealt to data ranks, a step on every mesh."""
    for difference, steps in (answered["training"] for answered in slices.results(ranks)):
        assert steps >= 4
        assert difference <= 1e-6


def test_another_model_is_refused_before_anything_moves() -> None:
    old, shell = policy(False), policy(False, wide=2)
    before = {name: parameter.clone() for name, parameter in old.named_parameters()}
    with pytest.raises(ValueError, match=r"of another model: \d+ parameters differ"):
        move_state(old, {}, shell.to("meta"), create_mesh())
    for name, parameter in old.named_parameters():
        assert torch.equal(parameter, before[name])


@pytest.mark.parametrize("there", ["meta", "cpu"])
def test_state_that_only_others_have_is_made_where_theirs_is(there: str) -> None:
    """A rank with an empty part may have none; what it makes takes part in the exchange, which
    another backend brings to a GPU than to the host, where offloaded state is. The meta device
    stands for the GPU; rank 0's answer is given."""
    old, shell = nn.Module(), nn.Module()
    old.empty = nn.Parameter(torch.empty(0, 4))
    shell.empty = nn.Parameter(torch.empty(0, 4, device="meta"))
    mesh = replace(create_mesh(), device=torch.device("meta"))
    moment = ["exp_avg", True, "bfloat16", there, None]
    described = {"empty": [moment, ["step", False, "float32", there, 3.0]]}
    with patch.object(Ranks, "from_first", lambda *_: described):
        state = move_state(old, {}, shell, mesh).state["empty"]
    assert {tensor.device.type for tensor in state.values()} == {there}
    assert state["exp_avg"].shape == (0, 4)
    assert state["exp_avg"].dtype == torch.bfloat16
    assert state["step"].shape == ()
    assert there == "meta" or state["step"].item() == 3.0
