"""How vLLM's CPU backend multiplies with the pairs of adapters: once for each adapter of a step.

vLLM 0.32 gathers a copy of A and of B for every token, and takes those of the last adapter for a
token that has none, whose index is -1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

Rows = torch.Tensor | slice


def install() -> None:
    """Replace the two products in vLLM's class for CPUs."""
    from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    def update_metadata(self: Any, *arguments: Any, **named: Any) -> None:
        PunicaWrapperBase.update_metadata(self, *arguments, **named)
        self.earl_rows = _rows_by_slot(self.token_lora_indices)

    PunicaWrapperCPU.earl_rows = []
    PunicaWrapperCPU.update_metadata = update_metadata
    PunicaWrapperCPU._apply_shrink = _apply_shrink
    PunicaWrapperCPU._apply_expand = _apply_expand


def _rows_by_slot(slots: torch.Tensor) -> list[tuple[int, Rows]]:
    """Each adapter's slot and the rows of its tokens. slots: int64 [tokens], -1 where there is
    none."""
    found: list[int] = torch.unique(slots).tolist()
    if len(found) == 1:
        return [(slot, slice(None)) for slot in found if slot >= 0]
    return [(slot, (slots == slot).nonzero().squeeze(1)) for slot in found if slot >= 0]


def _apply_shrink(
    self: Any, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, scale: float
) -> None:
    """y [tokens, rank], zeros at first, becomes the products of x [tokens, in] with each token's A,
    of w_t_all [slots, 1, rank, in]."""
    for slot, rows in self.earl_rows:
        y[rows] = F.linear(x[rows].to(y.dtype), w_t_all[slot, 0].to(y.dtype)) * scale


def _apply_expand(
    self: Any,
    y: torch.Tensor,
    x: torch.Tensor,
    w_t_all: torch.Tensor,
    y_offset: int,
    y_slice_size: int,
    add_inputs: bool = True,
) -> None:
    """Add to columns of y [tokens, out] the products of x [tokens, rank] with each token's B, of
    w_t_all [slots, 1, out, rank]."""
    for slot, rows in self.earl_rows:
        product = F.linear(x[rows].to(y.dtype), w_t_all[slot, 0].to(y.dtype))
        y[rows, y_offset : y_offset + y_slice_size] += product
