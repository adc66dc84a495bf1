"""Context ranks that find nothing but their own part of the routing, for `test_routing_reads`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch.distributed import fsdp  # noqa: F401  (imported before the ranks part)
from torch.distributed.tensor import DTensor

from earl_core.learner.attention.context_parallel import ContextCut
from earl_core.learner.data.packing import TrainingSample, plan_rows
from earl_core.learner.data.prefix_tree import build_tree
from earl_core.learner.parallel.mesh import UpdateMesh, create_mesh
from earl_core.trajectory.routing import RecordedRouting
from tests.learner.cuts import mesh_of
from tests.learner.test_router_balance import gradients, learner_of, routed_samples
from tests.learner.test_routing import SHAPE, rows_of

BUDGET = 60
MESHES = {"two": (2, 1, 2, 1), "four": (1, 1, 4, 1)}


def part_of(
    samples: Sequence[TrainingSample], mesh: UpdateMesh
) -> tuple[list[TrainingSample], int]:
    """The samples with an expert that no layer has wherever this rank computes nothing, which is an
    error to read; and the bytes of the tokens that it computes."""
    mine = [np.zeros(len(sample.tokens), bool) for sample in samples]
    computed = 0
    for rows in plan_rows(samples, range(len(samples)), BUDGET, False):
        tree = build_tree([samples[row].identity for row in rows])
        cut = ContextCut.even(tree.size, mesh.deployment.context_parallel)
        own = cut.positions(mesh.context_rank)
        computed += own.size * SHAPE.token_bytes
        for index, row in enumerate(rows):
            mine[row] |= np.isin(tree.positions(index), own)
    found = []
    for sample, read in zip(samples, mine, strict=True):
        assert sample.routing is not None
        rows = np.where(read[:, None], rows_of(sample), SHAPE.experts).astype(SHAPE.dtype)
        routing = RecordedRouting(SHAPE, rows, len(rows), "a sample", sample.routing.hashes)
        found.append(dataclasses.replace(sample, routing=routing))
    return found, computed


def compare(scratch: Path) -> dict[str, float]:
    """{"mesh gap": largest difference of a gradient from one process, "mesh read": bytes of the
    routing that this rank has read over those of the tokens that it computes}."""
    torch.set_num_threads(1)
    expected = load_file(scratch / "alone.safetensors")
    found: dict[str, float] = {}
    for title, sizes in MESHES.items():
        mesh = create_mesh(mesh_of(*sizes))
        every, ranks = routed_samples(scratch / "model"), mesh.deployment.data_parallel
        dealt = [each for each in every if each.group_id % ranks == mesh.data_rank]
        samples, computed = part_of(dealt, mesh)
        learner = learner_of(scratch / "model", 0.0, mesh=mesh, max_tokens_per_microbatch=BUDGET)
        own = gradients(learner, samples)
        assert own.keys() == expected.keys()
        whole = {
            name: part.full_tensor() if isinstance(part, DTensor) else part
            for name, part in own.items()
        }
        found[f"{title} gap"] = max(
            float((each - expected[name]).abs().max()) for name, each in whole.items()
        )
        read = sum(each.routing.read_bytes for each in samples if each.routing is not None)
        found[f"{title} read"] = read / computed
        mesh.close()
    return found
