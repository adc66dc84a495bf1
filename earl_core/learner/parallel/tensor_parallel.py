"""Tensor parallelism: each matrix of a layer split over ranks that see the same tokens.

Which matrix is split by columns and which by rows is the model's own plan (`base_model_tp_plan` of
its configuration); torch's `ColwiseParallel` and `RowwiseParallel` carry it out. Embedding and
output layer are split over the vocabulary. Between the matrices, where tokens do not meet, each
rank has some of the tokens: norms and the sums along the layers (sequence parallelism, as in
arXiv 2205.05198). What is split otherwise is gathered before a layer's first matrices and summed
to its owners after its last ones. The parameters between are whole on every rank, plain tensors,
and their gradients are those of its own tokens: `Gradients` adds them up, in float32.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from earl_core.deployment.feasibility import tensor_degrees, tensor_problem
from earl_core.deployment.shapes import ModelShape
from earl_core.learner.head import decoder_of, head_of
from earl_core.learner.parallel.vocabulary_parallel import VocabularyShard
from earl_core.pretrained.huggingface import PreTrainedModel
from earl_core.system.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_STYLES: dict[str, Callable[[], ParallelStyle | None]] = {
    "colwise": ColwiseParallel,
    "rowwise": partial(RowwiseParallel, output_layouts=Shard(1)),
    # A norm over each head, between a split matrix and attention; a rank has some of the heads.
    "replicated_with_grad_allreduce": lambda: None,
}


def split_over_ranks(model: PreTrainedModel, ranks: DeviceMesh) -> VocabularyShard:
    """Split the model's weights in place over the one-dimensional mesh; without communication.

    The model may be on the meta device; else every rank has the same whole weights. Returns the
    part of the vocabulary that this rank holds. Raises ConfigError, with the degrees that work,
    for a model that cannot be split so often.
    """
    check_degree(model, ranks.size())
    decoder = decoder_of(model)
    styles = _styles(decoder, _plan(model))
    tokens = _TokenParts(ranks)
    for name in _entered(styles):
        decoder.get_submodule(name).register_forward_pre_hook(
            partial(_enter_once, tokens), with_kwargs=True
        )
    decoder.register_forward_hook(partial(_leave, tokens))
    split = {name: style for name, style in styles.items() if style is not None}
    parallelize_module(decoder, ranks, split, src_data_rank=None)
    shard = _split_vocabulary(model, tokens)
    with torch.no_grad():
        for parameter in model.parameters():
            if isinstance(parameter, DTensor) and not parameter.is_meta:
                # A part is a view until here and would keep the whole tensor alive.
                parameter._local_tensor = parameter._local_tensor.clone()
    return shard


def check_degree(model: PreTrainedModel, degree: int) -> None:
    """Raise ConfigError unless the model can be split over so many ranks."""
    if degree == 1:
        return
    problem, working = _unsplittable(model), [1]
    if not problem:
        shape = ModelShape.from_config(model.config.to_dict())
        problem, working = tensor_problem(shape, degree, False), tensor_degrees(shape, False)
    if problem:
        raise ConfigError(
            f"{type(model).__name__} cannot be split over {degree} tensor-parallel ranks: "
            f"{problem}: set tensor_parallel to {' or '.join(map(str, working))}, or use shard or "
            "context_parallel instead"
        )


def _unsplittable(model: PreTrainedModel) -> str:
    """Why no degree works, whatever its sizes; empty when one may."""
    plan = _plan(model)
    if not plan:
        return "transformers has no plan for it (base_model_tp_plan)"
    unknown = sorted({style for style in plan.values() if style not in _STYLES})
    if unknown:
        return f"its plan asks for {', '.join(unknown)}, which is not supported"
    embedding = type(model.get_input_embeddings())
    if embedding is not nn.Embedding:
        return f"its embeddings are of a special kind ({embedding.__name__})"
    decoder = decoder_of(model)
    others = _unplanned(decoder, _styles(decoder, plan))
    return f"its plan does not say how {others[0]} is split" if others else ""


def _plan(model: PreTrainedModel) -> dict[str, str]:
    """Module pattern below the decoder → style; embeddings, split here anyway, are left out."""
    config: Any = model.config.get_text_config()
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    return {name: style for name, style in plan.items() if not style.startswith("embedding")}


def _styles(decoder: nn.Module, plan: dict[str, str]) -> dict[str, ParallelStyle | None]:
    """The style of each module that the plan names; None where it is whole on every rank."""
    styles: dict[str, ParallelStyle | None] = {}
    for pattern, style in plan.items():
        wanted = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        for name, _ in decoder.named_modules():
            if wanted.fullmatch(name):
                styles[name] = _STYLES[style]()
    return styles


def _entered(styles: Mapping[str, ParallelStyle | None]) -> set[str]:
    """The modules whose first matrices are split by columns: attention and MLP of each layer."""
    return {
        name.rpartition(".")[0]
        for name, style in styles.items()
        if isinstance(style, ColwiseParallel)
    }


def _unplanned(decoder: nn.Module, styles: Mapping[str, ParallelStyle | None]) -> list[str]:
    """What has parameters and no style, and is neither the embedding nor a module between the
    matrices that takes token by token, as norms do: its gradients would be wrong.
    """
    inside = tuple(f"{name}." for name in _entered(styles))
    embedding = cast(PreTrainedModel, decoder).get_input_embeddings()
    found: list[str] = []
    for name, module in decoder.named_modules():
        own = next(module.parameters(recurse=False), None)
        if own is not None and name not in styles and module is not embedding:
            whole = isinstance(module, nn.Embedding) or next(module.children(), None) is not None
            if whole or name.startswith(inside):
                found.append(name)
    return found


class _TokenParts:
    """The tokens of a pack, dealt to the ranks as `torch.chunk` does: [1, T_r, hidden] of each.

    A pack is known by its embedding, and until the next one's all layers are of it.
    """

    def __init__(self, ranks: DeviceMesh) -> None:
        self.ranks = ranks
        self._tokens = 0

    def embed(
        self, shard: VocabularyShard, embedding: nn.Embedding, ids: torch.Tensor
    ) -> torch.Tensor:
        """Look up ids [1, T] → this rank's [1, T_r, hidden]."""
        self._tokens = ids.shape[1]
        found = shard.embed(embedding, ids)
        summands = DTensor.from_local(found, self.ranks, [Partial()], run_check=False)
        return summands.redistribute(placements=[Shard(1)]).to_local()

    def whole(self, part: torch.Tensor) -> DTensor:
        """This rank's [1, T_r, hidden] → [1, T, hidden]; the gradient is the sum over the ranks."""
        shape = torch.Size((1, self._tokens, part.shape[2]))
        stride = (shape[1] * shape[2], shape[2], 1)
        parts = DTensor.from_local(
            part, self.ranks, [Shard(1)], run_check=False, shape=shape, stride=stride
        )
        return parts.redistribute(placements=[Replicate()])


def _enter_once(
    tokens: _TokenParts, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give several column-split matrices one input, of all tokens.

    The gradients that they send back to it are then added up here before they are summed over the
    ranks: one sum for queries, keys and values instead of three.
    """
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": tokens.whole(kwargs["hidden_states"])}
    return (tokens.whole(args[0]), *args[1:]), kwargs


def _leave(tokens: _TokenParts, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Give the head, whose gradient is equal on all ranks, all tokens."""
    output["last_hidden_state"] = tokens.whole(output[0]).to_local()
    return output


def _split_vocabulary(model: PreTrainedModel, tokens: _TokenParts) -> VocabularyShard:
    """Split embedding and output layer by rows; tied weights stay one parameter."""
    ranks = tokens.ranks

    def split(parameter: torch.Tensor) -> nn.Parameter:
        parts = distribute_tensor(parameter.detach(), ranks, [Shard(0)], src_data_rank=None)
        return nn.Parameter(parts, requires_grad=parameter.requires_grad)

    embedding = cast(nn.Embedding, model.get_input_embeddings())
    head: Any = head_of(model)
    tied = head.weight is embedding.weight
    whole = embedding.weight.shape[0]
    if head.weight.shape[0] != whole:
        raise ConfigError(
            f"{type(model).__name__} reads {whole} different tokens but writes "
            f"{head.weight.shape[0]}: set tensor_parallel to 1."
        )
    embedding.weight = split(embedding.weight)
    head.weight = embedding.weight if tied else split(head.weight)
    if getattr(head, "bias", None) is not None:
        head.bias = split(head.bias)
    most = -(-whole // ranks.size())
    start = min(whole, most * ranks.get_local_rank())
    shard = VocabularyShard(start, min(most, whole - start), most, ranks.get_group())
    embedding.forward = partial(tokens.embed, shard, embedding)  # type: ignore[method-assign]
    return shard
