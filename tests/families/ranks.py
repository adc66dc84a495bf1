"""Two ranks that compare the training of a family with one process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed import fsdp  # noqa: F401  (imported before the ranks part)

from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.learner.parallel.mesh import create_mesh
from earl_core.system.errors import ConfigError
from tests.learner.cuts import mesh_of
from tests.learner.mesh_cases import Case
from tests.learner.mesh_ranks import compute_alone, differences

MESHES = {
    "replicas": mesh_of(2, 1, 1, 1),
    "shards": mesh_of(1, 2, 1, 1),
    "context parallel": mesh_of(1, 1, 2, 1),
    "tensor parallel": mesh_of(1, 1, 1, 2),
}
"""By column of the table."""

MIXTURES = {"expert parallel": mesh_of(2, 1, 1, 1)._replace(expert_parallel=2)}
"""Further ones of mixtures."""

LARGEST = 3e-6
LOSSES = 1e-5
"""They and the metrics are sums over all tokens, and some are of exponentials."""

# With a KL term, whose exponentials are of any size, losses would be rounded by more. In few
# microbatches, which other tests have many of, ranks wait less for each other.
CASE = Case(
    kind="model",
    algorithm={"kl": {"placement": "none"}},
    update={"max_tokens_per_microbatch": 512},
    samples=12,
    dealt=(0, 0, 1),
)


def prepare(directory: Path) -> None:
    """Write beside a model's directory, named as the case has it, what one process computes."""
    torch.set_num_threads(1)
    compute_alone(directory.parent, {"alone": CASE})


def compare(scratch: Path) -> dict[str, str]:
    """For each mesh why it was refused, or an empty text. Raises AssertionError where a mesh
    computes anything else than one process."""
    return _compare(scratch, MESHES)


def compare_mixture(scratch: Path) -> dict[str, str]:
    """The same of a mixture of experts."""
    return _compare(scratch, MESHES | MIXTURES)


def _compare(scratch: Path, meshes: dict[str, StageDeployment]) -> dict[str, str]:
    torch.set_num_threads(1)
    found = {}
    for column, shape in meshes.items():
        mesh = create_mesh(shape)
        try:
            learner = CASE.learner(scratch.parent, mesh)
            apart = differences(CASE, learner, scratch.parent / "alone.safetensors")
        except ConfigError as error:
            found[column] = str(error)
        else:
            worst = {kind: each for kind, each in apart.items() if not each <= _largest(kind)}
            assert not worst, f"{column}: {worst}"
            found[column] = ""
        mesh.close()
    return found


def _largest(kind: str) -> float:
    return LOSSES if kind in ("metric", "loss") else LARGEST
