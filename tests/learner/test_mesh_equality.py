"""Every mesh computes what one process computes: loss, gradients, three optimizer steps, scores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.dispatch.reads.plan import Layout
from earl_core.learner.parallel.mesh import UpdateMesh, create_mesh
from earl_core.learner.parallel.tensor_parallel import check_degree
from earl_core.system.errors import ConfigError
from tests.families.registry import build
from tests.learner import mesh_ranks
from tests.learner.cuts import mesh_of
from tests.learner.helpers import build_model
from tests.learner.launched import launch

# Some metrics are means of exponentials; the vocabulary is compared with float64.
LARGEST = {"metric": 1e-5, "vocabulary": 3e-5}


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process computes."""
    scratch = tmp_path_factory.mktemp("mesh")
    mesh_ranks.prepare(scratch)
    return scratch


def check(ranks: int, computed: Path, function: str, meshes: int) -> None:
    scratch = computed / f"{ranks}_{function}"
    found = launch("tests.learner.mesh_ranks", function, ranks, scratch, timeout_seconds=900)
    for rank, differences in enumerate(found):
        assert len({name.partition(")")[0] for name in differences}) == meshes
        worst = {
            name: difference
            for name, difference in differences.items()
            if not difference <= LARGEST.get(name.rpartition(" ")[2], 1e-6)
        }
        assert not worst, f"rank {rank}"


@pytest.mark.parametrize(
    ("ranks", "meshes"), [(2, 4), pytest.param(4, 10, marks=pytest.mark.campaign)]
)
def test_every_mesh_equals_one_process(ranks: int, meshes: int, computed: Path) -> None:
    check(ranks, computed, "compare", meshes)


@pytest.mark.parametrize(
    ("function", "ranks", "meshes"),
    [
        ("compare_mixed", 2, 4),
        pytest.param("compare_mixed_pairs", 4, 2, marks=pytest.mark.slow),
        pytest.param("compare_mixed", 4, 7, marks=pytest.mark.campaign),
    ],
)
def test_mixed_precision_on_every_mesh_equals_that_of_one_process(
    function: str, ranks: int, meshes: int, computed: Path
) -> None:
    scratch = computed / f"{ranks}_{function}"
    for found in launch("tests.learner.mesh_ranks", function, ranks, scratch):
        assert len(found) == meshes
        for mesh, distances in found.items():
            assert distances["gradient0 rounding"] > 1e-3, mesh
            # Later gradients are of weights that bf16 may have rounded the other way.
            equal = 1e-6 if distances.pop("exact") else 1.5 * distances["gradient0 rounding"]
            assert distances["gradient0"] <= equal, mesh
            for kind in ("score", "gradient1", "gradient2"):
                assert distances[kind] <= 1.5 * distances[f"{kind} rounding"], mesh


def test_ranks_are_numbered_as_the_dispatcher_numbers_them() -> None:
    deployment = mesh_of(2, 3, 2, 2)
    layout = Layout(data_parallel=6, ranks_per_replica=4)
    assert deployment.ranks == layout.ranks == 24
    for rank in range(deployment.ranks):
        place = UpdateMesh(deployment, rank, torch.device("cpu"))
        assert place.data_rank == layout.replica(rank)
        assert place.leader == (rank % 4 == 0)


def test_a_mesh_of_other_than_the_launched_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="has 6 ranks, but 1 were launched"):
        create_mesh(StageDeployment("update", shard=2, tensor_parallel=3))
    alone = create_mesh()
    assert alone.leader
    assert alone.group("world") is None


def test_degrees_that_do_not_divide_the_model_are_refused() -> None:
    llama = build_model("llama")
    check_degree(llama, 2)
    with pytest.raises(ConfigError, match=r"ranks: 4 does not .* tensor_parallel to 1 or 2,"):
        check_degree(llama, 4)
    with pytest.raises(ConfigError, match="transformers has no plan for it"):
        check_degree(build_model("gpt2"), 2)
    apertus = build("Apertus")
    with pytest.raises(ConfigError, match=r"how layers\.0\.mlp\.act_fn is split"):
        check_degree(apertus, 2)
