"""Tensors cut over a mesh in every way, and whether their boxes say so."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from earl_core.deployment.stage_deployment import AXES, StageDeployment
from earl_core.learner.parallel.mesh import UpdateMesh
from earl_core.tensors.collectives import Ranks
from earl_core.tensors.exchange import BoxExchange
from earl_core.tensors.slices import boxes_of_all, shares, slices_of


def mesh_of(*sizes: int) -> StageDeployment:
    """A mesh of so many ranks along each of `AXES`."""
    return StageDeployment("update", **dict(zip(AXES, sizes, strict=True)))


def meshes(ranks: int) -> list[StageDeployment]:
    """Every mesh of this many ranks."""
    sizes = itertools.product(range(1, ranks + 1), repeat=4)
    return [mesh_of(*each) for each in sizes if math.prod(each) == ranks]


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    """Every element has its own value."""
    return torch.arange(1.0, math.prod(shape) + 1).view(shape)


SHAPES = [(), (3,), (5, 7), (8, 4), (1, 5), (3, 2, 5)]


def cuts(mesh: UpdateMesh, whole: torch.Tensor) -> Iterator[DTensor]:
    """The tensor cut in every way that tensor parallelism and then FSDP2 may cut it."""
    tensor = mesh.device_mesh["tensor_parallel"]
    for placement in [Replicate(), *(Shard(each) for each in range(whole.ndim))]:
        part = distribute_tensor(whole.clone(), tensor, [placement])
        yield part
        if not whole.ndim:
            continue
        for dimensions in (("replicas", "shard"), ("context_parallel",)):
            module = nn.Module()
            module.weight = nn.Parameter(part)
            fully_shard(module, mesh=mesh.device_mesh[dimensions])
            yield module.weight
    grid = [Replicate(), Shard(0), Shard(whole.ndim - 1)] if whole.ndim else [Replicate()]
    for placements in itertools.product(grid, repeat=2):
        yield distribute_tensor(
            whole.clone(), mesh.device_mesh["context_parallel", "tensor_parallel"], list(placements)
        )


def check_boxes(mesh: UpdateMesh) -> int:
    """Boxes say where the local values stand; shares are everything, once; any box is reached."""
    ranks, cases = Ranks(mesh), 0
    for shape in SHAPES:
        whole = numbered(shape)
        parts = [whole, *cuts(mesh, whole)]
        named = {str(number): part for number, part in enumerate(parts)}
        slices = slices_of(named)
        boxes = boxes_of_all(slices, list(named), ranks)
        for each, held in zip(slices, boxes, strict=True):
            assert held[ranks.rank] == each.box
            if each.box.numel:
                assert torch.equal(whole[each.box.index], each.tensor), (shape, each.box)
            count = torch.zeros(shape)
            for part in shares(held):
                if part.numel:
                    count[part.index] += 1
            assert bool((count == 1).all()), (shape, held)
            cases += 1
        exchange = BoxExchange(mesh.group("world"), 4 * whole.nbytes)
        for old in range(len(parts)):
            new = (old + 5) % len(parts)
            moved = exchange.move(slices[old].tensor, boxes[old], boxes[new], shape)
            if boxes[new][ranks.rank].numel:
                assert torch.equal(moved, slices[new].tensor)
            if boxes[old][ranks.rank] == boxes[new][ranks.rank]:
                assert moved is slices[old].tensor
            else:
                exchange.drop(moved)
    return cases
