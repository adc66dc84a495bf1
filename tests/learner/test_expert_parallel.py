"""Experts divided over ranks compute what one process computes, and no token is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.learner import expert_ranks
from tests.learner.launched import launch
from tests.learner.test_mesh_equality import LARGEST


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process computes."""
    scratch = tmp_path_factory.mktemp("experts")
    expert_ranks.prepare(scratch)
    return scratch


@pytest.mark.parametrize(
    ("ranks", "meshes"),
    [(2, 2), pytest.param(4, 8, marks=[pytest.mark.slow, pytest.mark.campaign])],
)
def test_divided_experts_equal_one_process(ranks: int, meshes: int, computed: Path) -> None:
    scratch = computed / f"of_{ranks}"
    found = launch("tests.learner.expert_ranks", "compare", ranks, scratch, timeout_seconds=900)
    for rank, differences in enumerate(found):
        assert len({name.partition(")")[0] for name in differences}) == meshes
        worst = {
            name: difference
            for name, difference in differences.items()
            if not difference <= LARGEST.get(name.rpartition(" ")[2], 1e-6)
        }
        assert not worst, f"rank {rank}"


def test_divided_experts_in_mixed_precision_equal_those_of_one_process(computed: Path) -> None:
    scratch = computed / "mixed"
    for found in launch("tests.learner.expert_ranks", "compare_mixed", 2, scratch):
        assert len(found) == len(expert_ranks.TWO)
        for mesh, distances in found.items():
            assert distances["gradient0 rounding"] > 1e-3, mesh
            for kind in ("score", "gradient0", "gradient1", "gradient2"):
                assert distances[kind] <= 1.5 * distances[f"{kind} rounding"], mesh
