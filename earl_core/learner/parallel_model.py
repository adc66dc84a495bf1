"""A policy on a mesh: split over tensor ranks, then sharded with FSDP2.

Tensor parallelism first, which cuts matrices, then `fully_shard` of each decoder layer and of the
rest over the shard and context ranks: each gathers a layer's parameters when it computes it, and
the gradients are summed where the parts live. With nothing to split or shard a model stays what it
was, and no process group is asked for anything.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from earl_core.learner.model import PolicyModule, checkpoint_activations, settle
from earl_core.learner.parallel.mesh import UpdateMesh
from earl_core.learner.parallel.tensor_parallel import split_over_ranks
from earl_core.pretrained.huggingface import PreTrainedModel


@dataclass(frozen=True)
class ParallelModel:
    """A causal language model on one rank of a mesh.

    model: its parameters are plain tensors or DTensors, under their usual names. module: scores
    packs with it (`PolicyModule`); call it and nothing below it.
    """

    model: PreTrainedModel
    module: PolicyModule
    mesh: UpdateMesh

    def begin_microbatch(self, *, last: bool) -> None:
        """Call it before each microbatch: copies of the model exchange sums in the last only."""
        if isinstance(self.module, FSDPModule) and self.mesh.deployment.replicas > 1:
            self.module.set_requires_all_reduce(last)

    def rest(self) -> None:
        """Give back gathered parameters; each rank's `parameters()` are its own parts again."""
        if isinstance(self.module, FSDPModule):
            for module in self.module.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


def parallelize(
    model: PreTrainedModel,
    mesh: UpdateMesh,
    *,
    chunk_tokens: int | None = None,
    float32_head: bool = False,
) -> ParallelModel:
    """Lay a model out in place on the mesh's device.

    The model may be on the meta device and stays there; else every rank has the same whole
    weights, of which it keeps its parts. chunk_tokens, float32_head: as in
    `logprobs_of_trained`.

    Raises ConfigError, with the degrees that work, when it cannot be split so often.
    """
    vocabulary = None
    if mesh.deployment.tensor_parallel > 1:
        vocabulary = split_over_ranks(model, mesh.submesh("tensor_parallel"))
    module = PolicyModule(
        model, chunk_tokens=chunk_tokens, vocabulary=vocabulary, float32_head=float32_head
    )
    if mesh.group("parameters") is not None:
        parameters = mesh.parameter_mesh
        for layer in _layers(model):
            fully_shard(layer, mesh=parameters)
        fully_shard(module, mesh=parameters)
        for part in cast(nn.Module, module).modules():
            if isinstance(part, FSDPModule):
                # The loss has the denominators of the whole minibatch: gradients are sums.
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)
    elif not next(model.parameters()).is_meta:
        module.to(mesh.device)
    return ParallelModel(model, module, mesh)


def build_shell(source: ParallelModel, mesh: UpdateMesh) -> ParallelModel:
    """The same model on another mesh, all of it on the meta device.

    Each parameter there says what part of it belongs to this rank; it and the buffers are to be
    replaced by real ones.
    """
    with torch.device("meta"):
        model = type(source.model)(copy.deepcopy(source.model.config))
    model.generation_config = source.model.generation_config
    settle(model)
    if source.model.is_gradient_checkpointing:
        checkpoint_activations(model)
    module = source.module
    return parallelize(
        model, mesh, chunk_tokens=module.chunk_tokens, float32_head=module.float32_head
    )


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers; none are known where the model names none."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]
