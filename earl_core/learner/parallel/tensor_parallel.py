"""Tensor parallelism: each matrix of a layer split over ranks that see the same tokens.

Which matrix is split by columns and which by rows is the model's own plan (`base_model_tp_plan` of
its configuration). Embedding and output layer are split over the vocabulary. Between the matrices,
where tokens do not meet, each rank has some of the tokens: norms and the sums along the layers
(sequence parallelism, as in arXiv 2205.05198). Tensors that are split otherwise are gathered before
a layer's first matrices and summed to their owners after its last ones.

Parameters that are cut are DTensors, so that FSDP2 can cut them again. The parameters between are
plain, whole on every rank, and get from each the gradient of its tokens or heads: their sum is
theirs (`Gradients`). Layers compute with plain tensors, because torch 2.13 cannot compile DTensors
of unknown length: an outer size that no graph input has becomes a node of the backward graph that
is defined by itself (`sym_max(s, 1)`, which is `s`), and ends in a RecursionError.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from earl_core.config.feasibility import tensor_degrees, tensor_problem
from earl_core.deployment.shapes import ModelShape
from earl_core.learner.lm_head import ValueHead, decoder_of, head_of
from earl_core.learner.low_rank import PairedLinear
from earl_core.learner.parallel.cuts import cut, own_part
from earl_core.learner.parallel.vocabulary_parallel import VocabularyShard
from earl_core.pretrained.huggingface import PreTrainedModel
from earl_core.system.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# The last is a norm over each head, between a split matrix and attention.
_STYLES = ("colwise", "rowwise", "replicated_with_grad_allreduce")


def split_over_ranks(model: PreTrainedModel, ranks: DeviceMesh) -> VocabularyShard:
    """Split the model's weights in place over the one-dimensional mesh; without communication.

    The model may be on the meta device; else every rank has the same whole weights. Returns the
    part of the vocabulary that this rank holds. Raises ConfigError, with the degrees that work,
    for a model that cannot be split so often.
    """
    check_degree(model, ranks.size())
    decoder, parts = decoder_of(model), _TokenParts.of(ranks)
    styles = _styles(decoder, _plan(model))
    enter = partial(_enter_once, parts)
    for name in _entered(styles):
        decoder.get_submodule(name).register_forward_pre_hook(enter, with_kwargs=True)
    decoder.register_forward_pre_hook(partial(_lengthen, parts), with_kwargs=True)
    decoder.register_forward_hook(partial(_leave, parts))
    for name, style in styles.items():
        if style in ("colwise", "rowwise"):
            matrix = cast(nn.Linear, decoder.get_submodule(name))
            _split_matrix(matrix, ranks, parts, by_rows=style == "rowwise")
    return _split_vocabulary(model, ranks, parts)


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
    """Return the reason why no degree works, whatever its sizes; empty when one may."""
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
    styles = _styles(decoder, plan)
    for name, style in styles.items():
        kind = type(decoder.get_submodule(name))
        if style in ("colwise", "rowwise") and kind not in (nn.Linear, PairedLinear):
            return f"{name} is no linear layer ({kind.__name__})"
    others = _unplanned(decoder, styles)
    return f"its plan does not say how {others[0]} is split" if others else ""


def _plan(model: PreTrainedModel) -> dict[str, str]:
    """Module pattern below the decoder → style; embeddings, split here anyway, are left out."""
    config: Any = model.config.get_text_config()
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    return {name: style for name, style in plan.items() if not style.startswith("embedding")}


def _styles(decoder: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """The style of each module that the plan names."""
    styles = {}
    for pattern, style in plan.items():
        wanted = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        for name, _ in decoder.named_modules():
            if wanted.fullmatch(name):
                styles[name] = style
    return styles


def _entered(styles: dict[str, str]) -> set[str]:
    """The modules whose first matrices are split by columns: attention and MLP of each layer."""
    return {name.rpartition(".")[0] for name, style in styles.items() if style == "colwise"}


def _unplanned(decoder: nn.Module, styles: dict[str, str]) -> list[str]:
    """List the modules with parameters, but for the embedding, that the plan does not split, and
    that do not take token by token, as norms do. Gradients would be wrong."""
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


def _lengthen(
    parts: _TokenParts, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give the decoder tokens that belong to no sample, so that all ranks have equally many."""
    more = parts.missing(kwargs["input_ids"].shape[1])
    # Copies even where none are missing: torch.compile takes a view for another kind of input.
    longer = {name: F.pad(kwargs[name], (0, more)) for name in ("input_ids", "position_ids")}
    return args, kwargs | longer


def _leave(parts: _TokenParts, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Give the head, whose gradient is equal on all ranks, all tokens."""
    output["last_hidden_state"] = parts.gather_for_equals(output[0])
    return output


def _enter_once(
    parts: _TokenParts, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give several column-split matrices one input, of all tokens.

    The gradients that they send back to it are then added up here before they are summed over the
    ranks: one sum for queries, keys and values instead of three.
    """
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": parts.gather(kwargs["hidden_states"])}
    return (parts.gather(args[0]), *args[1:]), kwargs


class _ByColumns(PairedLinear):
    """[1, n P, inputs] → this rank's outputs of all tokens."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else own_part(self.bias)
        return self.with_pair(input, F.linear(input, own_part(self.weight), bias))

    def own_parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.lora_A, own_part(self.lora_B)


class _ByRows(PairedLinear):
    """This rank's inputs of all tokens → all outputs of this rank's tokens."""

    parts: _TokenParts

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # The product with A is a summand as well, and what follows it is linear: one sum for all.
        own = self.with_pair(input, F.linear(input, own_part(self.weight)))
        found = self.parts.sum(own)
        return found if self.bias is None else found + self.bias

    def own_parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        return own_part(self.lora_A), self.lora_B


def _split_matrix(
    matrix: nn.Linear, ranks: DeviceMesh, parts: _TokenParts, *, by_rows: bool
) -> None:
    """Its class says how it computes: compiled layers have one code, but each its own objects.

    Of a pair one is cut as the matrix is. The other is whole, and gets from each rank the gradient
    of its part, whose sum is its own.
    """
    dimension, paired = (1, "lora_A") if by_rows else (0, "lora_B")
    matrix.weight = cut(matrix.weight, ranks, dimension)
    if paired in matrix._parameters:
        setattr(matrix, paired, cut(getattr(matrix, paired), ranks, dimension))
    if by_rows:
        matrix.__class__ = _ByRows
        cast(_ByRows, matrix).parts = parts
        return
    matrix.__class__ = _ByColumns
    if matrix.bias is not None:
        matrix.bias = cut(matrix.bias, ranks, 0)


def _split_vocabulary(
    model: PreTrainedModel, ranks: DeviceMesh, parts: _TokenParts
) -> VocabularyShard:
    """Split embedding and output layer by rows; tied weights stay one parameter, and a critic's
    one row stays whole."""
    embedding = cast(nn.Embedding, model.get_input_embeddings())
    head: Any = head_of(model)
    tied, valued = head.weight is embedding.weight, isinstance(head, ValueHead)
    whole = embedding.weight.shape[0]
    if not valued and head.weight.shape[0] != whole:
        raise ConfigError(
            f"{type(model).__name__} reads {whole} different tokens but writes "
            f"{head.weight.shape[0]}: set tensor_parallel to 1."
        )
    embedding.weight = cut(embedding.weight, ranks, 0)
    if not valued:
        head.weight = embedding.weight if tied else cut(head.weight, ranks, 0)
    if getattr(head, "bias", None) is not None:
        head.bias = cut(head.bias, ranks, 0)
    most = -(-whole // ranks.size())
    start = min(whole, most * ranks.get_local_rank())
    shard = VocabularyShard(start, min(most, whole - start), most, ranks.get_group())
    embedding.forward = partial(_embed, parts, shard, embedding)  # type: ignore[method-assign]
    return shard


def _embed(
    parts: _TokenParts, shard: VocabularyShard, embedding: nn.Embedding, ids: torch.Tensor
) -> torch.Tensor:
    """Look up ids [1, n P] → this rank's [1, P, hidden]."""
    return parts.sum(shard.embed(embedding, ids))


@dataclass(frozen=True)
class _TokenParts:
    """Parts of a pack's T tokens: each of n ranks has P in a row, those of rank r from r P.

    A compiled layer takes one number as a symbol, not one for each rank, so that all ranks have
    equally many: packs are lengthened to a multiple of the ranks. The collectives are torch's
    functional ones, which a compiled layer holds as they are.

    ranks: n. rank: this one. group: name of the process group.
    """

    ranks: int
    rank: int
    group: str

    @classmethod
    def of(cls, mesh: DeviceMesh) -> _TokenParts:
        """Make the parts of the ranks of a one-dimensional mesh."""
        return cls(mesh.size(), mesh.get_local_rank(), mesh.get_group().group_name)

    def missing(self, tokens: int) -> int:
        """n P - T, where P is at least two: torch.compile takes one for another kind of layer."""
        return max(-tokens % self.ranks, 2 * self.ranks - tokens)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """This rank's [1, P, hidden] → [1, n P, hidden]; the gradient is the sum over the ranks."""
        return _applied(_Gather, part, self)

    def gather_for_equals(self, part: torch.Tensor) -> torch.Tensor:
        """`gather` for what all ranks compute alike, so that their gradients are one."""
        return _applied(_GatherForEquals, part, self)

    def sum(self, summand: torch.Tensor) -> torch.Tensor:
        """Add up the ranks' [1, n P, hidden] → this rank's [1, P, hidden] of it."""
        return _applied(_Sum, summand, self)


def _applied(
    function: type[torch.autograd.Function], states: torch.Tensor, parts: _TokenParts
) -> torch.Tensor:
    found = function.apply(states, parts.ranks, parts.rank, parts.group)  # type: ignore[no-untyped-call]
    return cast(torch.Tensor, found)


def _gathered(part: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    ops = torch.ops._c10d_functional
    rows = ops.wait_tensor(ops.all_gather_into_tensor(part.contiguous(), ranks, group))
    return cast(torch.Tensor, rows.view(1, -1, part.shape[2]))


def _summed(summand: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    ops = torch.ops._c10d_functional
    rows = summand.reshape(ranks, -1, summand.shape[2])
    # No view, because a compiled layer is compiled again for its input where another's was none.
    part = ops.reduce_scatter_tensor(rows.contiguous(), "sum", ranks, group)
    return cast(torch.Tensor, ops.wait_tensor(part))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, ranks: int, rank: int, group: str) -> torch.Tensor:
        ctx.ranks, ctx.group = ranks, group
        return _gathered(part, ranks, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _summed(gradients[0], ctx.ranks, ctx.group), None, None, None


class _GatherForEquals(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, ranks: int, rank: int, group: str) -> torch.Tensor:
        ctx.rank, ctx.size = rank, part.shape[1]
        return _gathered(part, ranks, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return gradients[0].narrow(1, ctx.rank * ctx.size, ctx.size), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summand: torch.Tensor, ranks: int, rank: int, group: str) -> torch.Tensor:
        ctx.ranks, ctx.group = ranks, group
        return _summed(summand, ranks, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _gathered(gradients[0], ctx.ranks, ctx.group), None, None, None
