"""Gradients of a model whose parameters lie on different meshes: sums, norm and clipping.

A gradient is a sum over tokens with the whole minibatch's denominators, so the ranks' parts add up.
FSDP2 does so for the parameters it holds; here the others are, once for each optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from earl_core.deployment.stage_deployment import AXES
from earl_core.learner.parallel.expert_mesh import PARTS
from earl_core.learner.parallel.mesh import COMBINED, UpdateMesh
from earl_core.tensors.slices import buckets


class Gradients:
    """The gradients of these parameters. All methods are collective over the mesh."""

    def __init__(self, parameters: Iterable[nn.Parameter], mesh: UpdateMesh) -> None:
        self._mesh = mesh
        places = dict(zip(AXES, mesh.coordinates, strict=True))
        self._trained = [each for each in parameters if each.requires_grad]
        self._counted: list[nn.Parameter] = []
        """Parameters whose elements this rank counts in a norm."""
        self._copied: list[nn.Parameter] = []
        """Parameters that tensor ranks hold copies of, with gradients of their tokens or heads."""
        self._experts: list[nn.Parameter] = []
        """Parameters that are cut by expert; replicas have others of them."""
        for parameter in self._trained:
            cut, seen = _cut_dimensions(parameter), places
            if mesh.experts is not None and "expert_parallel" in cut:
                seen = mesh.experts.coordinates
                self._experts.append(parameter)
            if all(place == 0 for name, place in seen.items() if name not in cut):
                self._counted.append(parameter)
            if mesh.deployment.tensor_parallel > 1 and "tensor_parallel" not in cut:
                self._copied.append(parameter)
        divided = set(map(id, self._experts))
        self._others = [each for each in self._trained if id(each) not in divided]

    @torch.no_grad()
    def reduce(self) -> None:
        """Add up what the ranks that hold the same elements found, where that is not done yet."""
        if self._mesh.deployment.ranks == 1:
            return
        if self._mesh.group("parameters") is None:
            _add_up(self._others, self._mesh.group("replicas"))
            experts = self._mesh.experts
            _add_up(self._experts, experts.group("expert_copies") if experts else None)
        _add_up(self._copied, self._mesh.group("tensor_parallel"))

    @torch.no_grad()
    def clip(self, largest: float) -> float:
        """Scale all gradients so that their norm is at most `largest`; returns it from before. The
        norm is the whole gradient's, equal on all ranks. One that is not finite scales nothing."""
        norm = get_total_norm(_local_gradients(self._counted))
        world = self._mesh.group("world")
        if world is not None:
            square = norm.to(self._mesh.device).double().square()
            dist.all_reduce(square, group=world)
            norm = square.sqrt()
        found = float(norm)
        scale = largest / (found + 1e-6)
        if math.isfinite(found) and scale < 1.0:
            torch._foreach_mul_(_local_gradients(self._trained), scale)
        return found


def _add_up(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Make the gradients their sums over the group; None: of this rank alone."""
    if group is not None:
        for bucket in _in_buckets(parameters):
            _through_flat(bucket, lambda flat: dist.all_reduce(flat, group=group))


def _cut_dimensions(parameter: torch.Tensor) -> set[str]:
    """The mesh dimensions whose ranks hold different elements."""
    if not isinstance(parameter, DTensor):
        return set()
    names = parameter.device_mesh.mesh_dim_names or ()
    cut: set[str] = set()
    for name, placement in zip(names, parameter.placements, strict=True):
        if not placement.is_replicate():
            cut.update((COMBINED | {"expert_parts": PARTS}).get(name, (name,)))
    return cut


def _local_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of the gradient, as a plain tensor that shares its memory."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return gradient
    assert isinstance(parameter, DTensor)
    if gradient.placements != parameter.placements:
        parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
    local: torch.Tensor = gradient.to_local()
    return local


def _local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """The gradients there are; all ranks have the same ones."""
    gradients = map(_local_gradient, parameters)
    return [gradient for gradient in gradients if gradient is not None]


def _in_buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[torch.Tensor]]:
    """Their gradients, a bucket at a time."""
    return buckets(_local_gradients(parameters), lambda each: each.nbytes)


def _through_flat(bucket: list[torch.Tensor], act: Callable[[torch.Tensor], object]) -> None:
    """Let `act` change the bucket's gradients as one tensor."""
    flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
    act(flat)
    start = 0
    for gradient in bucket:
        gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()
