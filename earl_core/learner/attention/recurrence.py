"""Layers that carry a state along, over trees of runs: the gated delta rule, a short convolution.

Gated delta nets (arXiv 2412.06464; Qwen3-Next, Qwen3.5, OLMo hybrid) mix tokens in two places: a
causal convolution over few tokens, and a recurrence whose state is a matrix for each head.
transformers has both as functions of a family's module. They are replaced there by functions that,
where a pack's boundaries come with the call, begin each run with what its parent ended with; all
else of a layer is the family's own. A call without boundaries is the family's own, too.

The functions compute with whatever transformers found for the family: on CUDA the kernels of `fla`
and `causal_conv1d`, where these are installed (not run so far), else its plain torch forms.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, wraps
from typing import Any, cast

import torch
from torch import nn

from earl_core.learner.attention.attention_plan import SampleBoundaries
from earl_core.learner.attention.state_plan import StateCall, StatePlan, kernels_found
from earl_core.learner.shared_rows import deal
from earl_core.pretrained.huggingface import PreTrainedModel

logger = logging.getLogger(__name__)

_CONVOLUTION, _RECURRENCE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"
_LARGEST_CHUNK = 64

Function = Callable[..., Any]


def carry_states(model: PreTrainedModel) -> None:
    """Have the model's gated delta nets begin each run of a pack with its parent's state.
    Idempotent; models without such layers stay as they are."""
    for module in {sys.modules[type(layer).__module__] for layer in _delta_nets(model)}:
        for name, made in ((_CONVOLUTION, _convolving), (_RECURRENCE, _recurring)):
            own = getattr(module, name)
            if not hasattr(own, "_earl_original"):
                setattr(module, name, made(own))


def state_widths(model: nn.Module) -> tuple[int, ...]:
    """How many inputs the convolutions of the model's gated delta nets see, each width once; empty
    for a model without such layers."""
    convolutions = (cast(Any, layer).conv1d for layer in _delta_nets(model))
    return tuple(sorted({int(each.kernel_size[0]) for each in convolutions}))


def _delta_nets(model: nn.Module) -> Iterator[nn.Module]:
    for layer in model.modules():
        family = sys.modules.get(type(layer).__module__)
        known = hasattr(family, _CONVOLUTION) and hasattr(family, _RECURRENCE)
        if known and isinstance(getattr(layer, "conv1d", None), nn.Conv1d):
            yield layer


def _convolving(own: Function) -> Function:
    # How a pack is computed differs from pack to pack: a compiled layer calls it as it is.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @wraps(own)
    def convolve(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        *given: Any,
        sample_boundaries: SampleBoundaries | None = None,
        **named: Any,
    ) -> Any:
        """hidden_states [1, channels, T] -> [1, channels, T]."""
        if sample_boundaries is None:
            return own(hidden_states, weight, *given, **named)
        device = hidden_states.device
        form = _form(own, device, kernels_found(device))
        plan = sample_boundaries.convolution(weight.shape[-1])
        if plan.inputs is None:
            return form(hidden_states, weight, *given, **named)
        (sequence,) = deal(hidden_states.squeeze(0).t(), [plan.inputs])
        if plan.zeros is not None and plan.zeros.numel():
            sequence.index_fill_(0, plan.zeros, 0.0)
        found = form(sequence.t().unsqueeze(0), weight, *given, **named)
        return found.squeeze(0).t().index_select(0, plan.outputs).t().unsqueeze(0)

    cast(Any, convolve)._earl_original = own
    return convolve


def _recurring(own: Function) -> Function:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @wraps(own)
    def recur(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        *given: Any,
        sample_boundaries: SampleBoundaries | None = None,
        **named: Any,
    ) -> Any:
        """query, key [1, T, heads, key dim], value [1, T, heads, value dim], g (log of the decay)
        and beta [1, T, heads] -> ([1, T, heads, value dim], None)."""
        if sample_boundaries is None:
            return own(query, key, value, g, beta, *given, **named)
        # The kernel takes no float32.
        kernel = kernels_found(query.device) and query.dtype != torch.float32
        plan = sample_boundaries.recurrence(kernel)
        inputs = [x.squeeze(0) for x in (query, key, value, g, beta)]
        outputs = _over_tree(_form(own, query.device, kernel), plan, inputs, named)
        return outputs.unsqueeze(0), None

    cast(Any, recur)._earl_original = own
    return recur


def _over_tree(
    form: Function,
    plan: StatePlan,
    inputs: list[torch.Tensor],
    named: dict[str, Any],
) -> torch.Tensor:
    """inputs: query, key, value, g and beta, [T, heads, ...] -> [T, heads, value dim]."""
    calls = [call for generation in plan.generations for call in generation]
    dealt = zip(*(deal(each, [call.tokens for call in calls]) for each in inputs), strict=True)
    outputs: list[torch.Tensor] = []
    states: torch.Tensor | None = None
    for number, generation in enumerate(plan.generations, start=1):
        begun: Sequence[torch.Tensor | None] = [None] * len(generation)
        parents = [call.parents for call in generation if call.parents is not None]
        if states is not None:
            begun = deal(states, parents)
        wanted = number < len(plan.generations)
        ends = []
        for call, state in zip(generation, begun, strict=True):
            found, end = _call(form, call, next(dealt), state, wanted, named)
            outputs.append(found)
            ends.append(end)
        states = torch.cat(ends) if wanted else None
    every = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return every if plan.scatter is None else every.index_select(0, plan.scatter)


def _call(
    form: Function,
    call: StateCall,
    inputs: tuple[torch.Tensor, ...],
    state: torch.Tensor | None,
    wanted: bool,
    named: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of a call's tokens, [tokens, heads, value dim], and where `wanted` the float32
    states of its runs, [runs, heads, key dim, value dim]."""
    sequences = 1 if call.cu_seqlens is not None else call.count
    query, key, value, g, beta = (x.reshape(sequences, -1, *x.shape[1:]) for x in inputs)
    if call.real is not None:
        # A token that neither decays the state nor writes to it leaves it as it is.
        padding = ~call.real.unsqueeze(-1)
        g, beta = g.masked_fill(padding, 0.0), beta.masked_fill(padding, 0.0)
    options = named | {
        "initial_state": state,
        "output_final_state": wanted,
        "cu_seqlens": call.cu_seqlens,
        # A chunk is padded to its size.
        "chunk_size": min(_LARGEST_CHUNK, 1 << (call.length - 1).bit_length()),
    }
    found, end = form(query, key, value, g=g, beta=beta, **options)
    return found.flatten(0, 1), end


def _form(own: Function, device: torch.device, kernel: bool) -> Function:
    """What computes on the device: transformers' choice, which is the kernel that is installed, or
    its plain torch form."""
    if kernel:
        return own
    if device.type != "cpu":
        _warn_of_cost()
    # transformers' own warning has no news for a CPU.
    return cast(Function, getattr(own, "__wrapped__", own))


@cache
def _warn_of_cost() -> None:
    logger.warning(
        "layers with a state are computed by plain torch, an order of magnitude slower than by "
        "kernels and with more memory: install flash-linear-attention and causal-conv1d, and train "
        "in bf16"
    )
