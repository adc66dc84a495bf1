"""Expert parallelism: each rank holds whole experts of every routed layer, and tokens go to them.

All ranks have tokens of their own. A rank says how many rows it has for each expert, sends each row
to the rank that holds its expert, and gets the expert's output back, by all-to-all: no expert has
a capacity, and no token is dropped. The router's weights are applied where the token is, so that
nothing but rows of hidden states travels. After GShard (arXiv 2006.16668), and torchtitan's
`token_dispatcher.py`.

Rows are sorted by expert, then by rank, then by token, and a token's outputs are summed in the
order of its choices: every sum has one order.

What an expert computes is the family's own code, with one expert and the weight 1 for each row.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from earl_core.deployment.shapes import ModelShape
from earl_core.learner.parallel.cuts import cut, own_part
from earl_core.pretrained.huggingface import PreTrainedModel
from earl_core.system.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def divide_experts(model: PreTrainedModel, ranks: DeviceMesh) -> None:
    """Give each rank of the one-dimensional mesh its experts, in place; without communication.

    The model may be on the meta device; else every rank has the same whole weights. A model without
    experts stays as it is. Raises ConfigError for experts that cannot be divided so.
    """
    layers = _layers_of(model)
    number = ModelShape.from_config(model.config.to_dict()).experts
    if number > 1 and not layers:
        raise _undivided(model, "they are no layers of transformers' experts interface")
    for name, experts in layers.items():
        parameters = experts._parameters
        held: int = cast(Any, experts).num_experts
        if any(each is None or each.shape[0] != held for each in parameters.values()):
            raise _undivided(model, f"{name} has tensors that are not joined by expert")
        if held % ranks.size():
            raise _undivided(model, f"{ranks.size()} does not divide the {held} of {name}")
        for leaf, parameter in parameters.items():
            parameters[leaf] = cut(cast(torch.Tensor, parameter), ranks, 0)
        # Beside the class, which the part that is local to this rank keeps.
        vars(experts)["forward"] = partial(_at_home, _Experts(experts, ranks))


def _layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The experts of each routed layer, by name: transformers marks those of its interface."""
    return {n: m for n, m in model.named_modules() if "_is_expert_parallel" in vars(m)}


def _undivided(model: PreTrainedModel, why: str) -> ConfigError:
    return ConfigError(
        f"the experts of {type(model).__name__} cannot be divided: {why}",
        remedy="set stages.update.expert_parallel to 1",
    )


class _Experts:
    """The experts of a layer. number: all. held: by this rank. group: name of the process group
    whose ranks hold the others."""

    def __init__(self, module: nn.Module, ranks: DeviceMesh) -> None:
        self._module = module
        self._degree = ranks.size()
        self.group = ranks.get_group().group_name
        self.number: int = cast(Any, module).num_experts
        self.held = self.number // self._degree

    def counts(self, sent: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int]]:
        """Rows for each expert, [experts] → rows from each rank for each expert here, [ranks,
        held]; rows for and from each rank. The host waits for it."""
        received = _exchanged(sent, [self.held] * self._degree, [self.held] * self._degree, self)
        both = torch.stack([sent, received]).view(2, self._degree, self.held)
        leaving, coming = both.sum(dim=2).tolist()
        return both[1], leaving, coming

    def compute(self, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Run each of the rows [R, hidden] through its expert, counted from the first one here."""
        # A view of the module with this rank's part as plain tensors in place of DTensors.
        local: Any = copy.copy(self._module)
        local.__dict__ = {name: each for name, each in vars(local).items() if name != "forward"}
        parameters = self._module._parameters.items()
        local._parameters = {n: own_part(cast(torch.Tensor, each)) for n, each in parameters}
        local.num_experts = self.held
        found = type(self._module).forward(
            local, rows, experts[:, None], rows.new_ones(len(rows), 1)
        )
        return cast(torch.Tensor, found)


# How many rows travel is known to the host alone, so that nothing of it could be compiled.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _at_home(
    experts: _Experts,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Compute what the layer's experts compute of this rank's tokens, [T, hidden], wherever they
    are. top_k_index, top_k_weights: [T, k]."""
    tokens, chosen = top_k_index.shape
    wanted, order = torch.sort(top_k_index.reshape(-1), stable=True)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    counts, leaving, coming = experts.counts(torch.bincount(wanted, minlength=experts.number))
    rows = _apply(_Spread, hidden_states, order, back, chosen)
    rows = _apply(_Exchange, rows, coming, leaving, experts)
    own = torch.arange(experts.held, device=order.device).repeat(len(coming))
    rows = experts.compute(rows, own.repeat_interleave(counts.reshape(-1), output_size=len(rows)))
    rows = _apply(_Exchange, rows, leaving, coming, experts)
    rows = _apply(_Permute, rows, back, order)
    weighted = rows * top_k_weights.reshape(-1, 1)
    return weighted.view(tokens, chosen, -1).sum(dim=1).to(hidden_states.dtype)


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> torch.Tensor:
    return cast(torch.Tensor, function.apply(*arguments))  # type: ignore[no-untyped-call]


def _exchanged(
    rows: torch.Tensor, coming: list[int], leaving: list[int], experts: _Experts
) -> torch.Tensor:
    ops = torch.ops._c10d_functional
    found = ops.all_to_all_single(rows.contiguous(), coming, leaving, experts.group)
    return cast(torch.Tensor, ops.wait_tensor(found))


class _Exchange(torch.autograd.Function):
    """Rows in the order of the ranks that get them → rows in that of the ranks they come from."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, coming: list[int], leaving: list[int], experts: _Experts
    ) -> torch.Tensor:
        ctx.given = leaving, coming, experts
        return _exchanged(rows, coming, leaving, experts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchanged(gradients[0], *ctx.given), None, None, None


class _Spread(torch.autograd.Function):
    """States of tokens, [T, hidden] → a row for each of their `chosen` experts, in this order."""

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, order: torch.Tensor, back: torch.Tensor, chosen: int
    ) -> torch.Tensor:
        ctx.save_for_backward(back)
        ctx.chosen = chosen
        return states[order // chosen]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        rows = gradients[0][ctx.saved_tensors[0]]
        summed = rows.view(-1, ctx.chosen, rows.shape[1]).sum(dim=1)
        return summed, None, None, None


class _Permute(torch.autograd.Function):
    """Rows in another order; back: the way from there."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, order: torch.Tensor, back: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(back)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradients[0][ctx.saved_tensors[0]], None, None
