"""Experts divided over ranks compute what one process computes, and no token is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.learner import expert_ranks
from tests.learner.launched import launch
from tests.learner.test_mesh_equality import LARGEST


@pytest.mark.parametrize(
    ("ranks", "meshes"),
    [(2, 2), pytest.param(4, 8, marks=[pytest.mark.slow, pytest.mark.campaign])],
)
def test_divided_experts_equal_one_process(ranks: int, meshes: int, tmp_path: Path) -> None:
    expert_ranks.prepare(tmp_path)
    scratch = tmp_path / "ranks"
    found = launch("tests.learner.expert_ranks", "compare", ranks, scratch, timeout_seconds=900)
    for rank, differences in enumerate(found):
        assert len({name.partition(")")[0] for name in differences}) == meshes
        worst = {
            name: difference
            for name, difference in differences.items()
            if not difference <= LARGEST.get(name.rpartition(" ")[2], 1e-6)
        }
        assert not worst, f"rank {rank}"
