"""A policy on a mesh: split over tensor ranks or by expert, then sharded with FSDP2.

Tensor parallelism first, which cuts matrices, then `fully_shard` over the shard and context ranks
of the embedding, of each decoder layer, of the last norm, of the output layer, and of the rest:
each gathers a unit's parameters to compute it; gradients are summed where the parts live.

Mixed precision is FSDP2's: what is gathered is bf16, the parts and the sums of gradients are
float32 (bf16 the parts that an adapter leaves frozen), and nothing is cast but the parameters. A
copy lives no longer than its unit computes. A model that nobody shares is therefore wrapped too,
over a mesh of one rank, which communicates nothing; in float32 it stays what it was, and no process
group is asked for anything.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
)
from torch.distributed.tensor import DTensor, Shard

from earl_core.learner.layer_probe import decoder_layers
from earl_core.learner.lm_head import ValueHead, decoder_of, give_value_head, head_of
from earl_core.learner.low_rank import attach_pairs, pairs_of, peft_name
from earl_core.learner.model import PolicyModule, Scoring, settle
from earl_core.learner.parallel.expert_mesh import ExpertMesh
from earl_core.learner.parallel.expert_parallel import divide_experts
from earl_core.learner.parallel.mesh import UpdateMesh
from earl_core.learner.parallel.tensor_parallel import split_over_ranks
from earl_core.learner.value_scoring import ValueScoring
from earl_core.pretrained.huggingface import PreTrainedModel
from earl_core.pretrained.logit_transform import LogitTransform
from earl_core.pretrained.routers import freeze_routers
from earl_core.system.errors import EarlError
from earl_core.weights.manifest import AdapterEntry


@dataclass(frozen=True)
class ParallelModel:
    """A causal language model on one rank of a mesh.

    model: its parameters are plain tensors or DTensors, under their usual names. module: scores
    packs with it (`PolicyModule`); call it and nothing below it. mixed: it computes in bf16.
    adapter: the one that alone is trained; None: all is, but for `frozen_routers`.
    """

    model: PreTrainedModel
    module: PolicyModule
    mesh: UpdateMesh
    mixed: bool
    adapter: AdapterEntry | None = None
    frozen_routers: bool = False

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that the policy's versions differ in, by name, tied ones once, and routers
        that are frozen: they are published and stored with the rest, and require no gradient."""
        return dict(self.model.named_parameters()) if not self.adapter else pairs_of(self.model)

    @property
    def published(self) -> dict[str, torch.Tensor]:
        """The float32 weights that others need to play this policy, by the names that they know:
        all, or an adapter's pairs as PEFT names them."""
        trained = {name: each.detach() for name, each in self.trained.items()}
        return {peft_name(n): t for n, t in trained.items()} if self.adapter else trained

    def begin_microbatch(self, *, last: bool) -> None:
        """Call it before each microbatch: copies of the model exchange sums in the last only.
        Shards exchange theirs in each, because sums of whole gradients would have to be kept."""
        if isinstance(self.module, FSDPModule) and self.mesh.deployment.replicas > 1:
            self.module.set_requires_all_reduce(last)

    def rest(self) -> None:
        """Give back gathered parameters; each rank's `parameters()` are its own parts again."""
        if isinstance(self.module, FSDPModule):
            for module in self.module.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Enclose forward and backward passes; call `rest` at the end.

        FSDP2 does not by itself forget a pass that an error cut off, such as memory that ran out:
        the next passes would lose gradients and say nothing. Torch before 2.13 cannot forget it,
        and the model refuses to compute from then on.
        """
        try:
            yield
        except BaseException:
            if isinstance(self.module, FSDPModule) and self.module._get_fsdp_state()._is_root:
                # Those of units that are gathered now would be added to the next ones.
                self.module.zero_grad()
                forget = getattr(self.module, "reset_iter_state", None)
                if forget is None:
                    cast(Any, self.module).forward = _cut_off
                else:
                    forget()
            raise
        self.rest()


def _cut_off(*given: Any) -> Any:
    raise EarlError(
        f"an earlier pass was cut off, after which torch {torch.__version__} computes wrongly",
        remedy="start the learner anew, or install torch 2.13",
    )


def parallelize(
    model: PreTrainedModel,
    mesh: UpdateMesh,
    *,
    mixed: bool = False,
    chunk_tokens: int | None = None,
    float32_head: bool = False,
    adapter: AdapterEntry | None = None,
    frozen_routers: bool = False,
) -> ParallelModel:
    """Lay a model out in place on the mesh's device.

    The model may be on the meta device and stays there; else every rank has the same whole float32
    weights, of which it keeps its parts. mixed: bf16 copies compute. chunk_tokens, float32_head: as
    in `Scoring`. adapter: pairs to attach and train, on the meta device. frozen_routers: the
    routers of a mixture get no gradient.

    Raises ConfigError, with the degrees that work, when it cannot be split so often, and for a
    model without routers that are to be frozen.
    """
    if frozen_routers:
        freeze_routers(model)
    if adapter is not None:
        attach_pairs(model, adapter, torch.bfloat16 if mixed else torch.float32)
    vocabulary = None
    if mesh.deployment.tensor_parallel > 1:
        vocabulary = split_over_ranks(model, mesh.submesh("tensor_parallel"))
    if mesh.experts is not None:
        divide_experts(model, mesh.experts.ranks)
    head = head_of(model)
    scoring: Scoring
    if isinstance(head, ValueHead):
        scoring = ValueScoring(head, mesh.deployment.tensor_parallel)
    else:
        scoring = Scoring(
            head,
            LogitTransform.of(model.config),
            chunk_tokens=chunk_tokens,
            vocabulary=vocabulary,
            float32_head=float32_head,
        )
    module = PolicyModule(model, scoring)
    if mixed or mesh.group("parameters") is not None:
        _shard(module, mesh, mixed)
    elif not next(model.parameters()).is_meta:
        module.to(mesh.device)
    return ParallelModel(model, module, mesh, mixed, adapter, frozen_routers)


def _shard(module: PolicyModule, mesh: UpdateMesh, mixed: bool) -> None:
    """Wrap the model's units in place.

    Each is gathered while the one before computes, as FSDP2 does it unasked: backward it begins
    one ahead; forward nothing on the host waits for the device, so that it is ahead by itself.
    Beginning earlier would hold one layer more.
    """
    options: dict[str, Any] = {"mesh": mesh.parameter_mesh}
    if mixed:
        options["mp_policy"] = MixedPrecisionPolicy(
            torch.bfloat16, torch.float32, cast_forward_inputs=False
        )
    alone = mesh.group("parameters") is None
    if mesh.experts is not None:
        options["shard_placement_fn"] = _placement(mesh.experts, copies=not alone)
    model, scoring = module.causal_lm, module.scoring
    embedding: Any = model.get_input_embeddings()
    # The backward pass begins with the last units.
    if scoring.head.weight is embedding.weight:
        fully_shard([embedding, scoring], **options, reshard_after_forward=False)
    else:
        fully_shard(embedding, **options)
        fully_shard(scoring, **options, reshard_after_forward=False)
    for layer in decoder_layers(model):
        fully_shard(layer, **options)
    for norm in _last_norm(model):
        # A unit of its own, because FSDP2 keeps the buffer in which a unit's gradients are summed
        # until the next one's are there: the head's would stay for all of the last layer.
        fully_shard(norm, **options, reshard_after_forward=False)
    # The model has its head in a second place, which does not make it a part of the rest.
    fully_shard(module, **options, ignored_params=set(scoring.head.parameters()))
    if alone:
        return
    for part in cast(nn.Module, module).modules():
        if isinstance(part, FSDPModule):
            # The loss has the denominators of the whole minibatch: gradients are sums.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def _placement(experts: ExpertMesh, *, copies: bool) -> Callable[[nn.Parameter], Any]:
    """Say for each parameter over which ranks FSDP2 shards it: an expert's over those that hold
    the same experts, any other over the mesh of its unit. copies: of experts add gradients up."""
    mesh = experts.parameter_mesh(copies=copies)
    info = FSDPMeshInfo(mesh, 0)
    if mesh.ndim == 2:
        info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    result = ShardPlacementResult(Shard(0), info)

    def of(parameter: nn.Parameter) -> ShardPlacementResult | None:
        return result if isinstance(parameter, DTensor) else None

    return of


def build_shell(source: ParallelModel, mesh: UpdateMesh) -> ParallelModel:
    """The same model on another mesh, all of it on the meta device.

    Each parameter there says what part of it belongs to this rank; it and the buffers are to be
    replaced by real ones. The learner that adopts it compiles its layers
    and says how they are checkpointed.
    """
    with torch.device("meta"):
        model = type(source.model)(copy.deepcopy(source.model.config))
        if isinstance(source.module.scoring, ValueScoring):
            give_value_head(model)
    model.generation_config = source.model.generation_config
    settle(model)
    scoring = source.module.scoring
    return parallelize(
        model,
        mesh,
        mixed=source.mixed,
        chunk_tokens=scoring.chunk_tokens,
        float32_head=scoring.float32_head,
        adapter=source.adapter,
        frozen_routers=source.frozen_routers,
    )


def _last_norm(model: PreTrainedModel) -> list[nn.Module]:
    """The norm after the layers; none where the model has none that looks like one."""
    norms = [
        module
        for module in decoder_of(model).children()
        if "norm" in type(module).__name__.lower() and next(module.parameters(), None) is not None
    ]
    return norms[-1:]
