"""Two ranks that compare the training of models with states with one process."""

from __future__ import annotations

from pathlib import Path

import torch

from earl_core.learner.parallel.mesh import create_mesh
from tests.learner.cuts import mesh_of
from tests.learner.helpers import save_model
from tests.learner.mesh_cases import STATES
from tests.learner.mesh_ranks import compute_alone, differences
from tests.learner.state_models import build_hybrid


def prepare(scratch: Path) -> None:
    """Write the models, and what one process computes in each case."""
    for case in STATES.values():
        save_model(build_hybrid(case.kind), scratch / case.kind, spread=1.0)
    compute_alone(scratch, STATES)


def compare(scratch: Path) -> dict[str, float]:
    """Replicas and shards in every case; {"mesh case kind": difference from one process}."""
    torch.set_num_threads(1)
    found: dict[str, float] = {}
    for shape in (mesh_of(2, 1, 1, 1), mesh_of(1, 2, 1, 1)):
        mesh = create_mesh(shape)
        for name, case in STATES.items():
            learner = case.learner(scratch.parent, mesh)
            for kind, difference in differences(name, learner, scratch.parent).items():
                found[f"{shape} {name} {kind}"] = difference
        mesh.close()
    return found
