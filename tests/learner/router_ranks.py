"""Balanced and kept routers on meshes of two ranks, for `test_router_balance`."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed import fsdp  # noqa: F401  (imported before the ranks part)
from torch.distributed.tensor import DTensor

from earl_core.learner.parallel.mesh import create_mesh
from earl_core.learner.parallel_model import build_shell
from tests.learner.cuts import mesh_of
from tests.learner.test_router_balance import gradients, learner_of, routed_samples, trained

MESHES = {"replicas": (2, 1, 1, 1), "shard": (1, 2, 1, 1), "context": (1, 1, 2, 1)}


def compare(scratch: Path) -> dict[str, float]:
    """{"mesh what": largest difference from one process}."""
    torch.set_num_threads(1)
    expected = {name: load_file(scratch / f"{name}.safetensors") for name in ("balanced", "kept")}
    found: dict[str, float] = {}
    for title, sizes in MESHES.items():
        mesh = create_mesh(mesh_of(*sizes))
        every = routed_samples(scratch / "model")
        ranks = mesh.deployment.data_parallel
        samples = [each for each in every if each.group_id % ranks == mesh.data_rank]
        balanced = gradients(
            learner_of(scratch / "model", mesh=mesh, max_tokens_per_microbatch=60), samples
        )
        kept = learner_of(scratch / "model", 0.0, True, mesh=mesh, epsilon=1e-2)
        for what, own in (("balanced", balanced), ("kept", trained(kept, samples))):
            assert own.keys() == expected[what].keys()
            for name, tensor in own.items():
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                gap = float((whole - expected[what][name]).abs().max())
                key = f"{title} {what}"
                found[key] = max(found.get(key, 0.0), gap)
        frozen = [n for n, p in kept.named_parameters() if not p.requires_grad]
        moved = dict(build_shell(kept.parallel, mesh).model.named_parameters())
        assert [name for name, each in moved.items() if not each.requires_grad] == frozen
        assert all(name.endswith("gate.weight") for name in frozen)
        assert frozen
        mesh.close()
    return found
