"""The part of vLLM's workers that holds an adapter's pairs: load them, and read them back; on a CPU
also multiply with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from earl_core.weights.load import open_weights
from earl_core.weights.manifest import WeightsManifest

_Sides = tuple[list[torch.Tensor | None], list[torch.Tensor | None]]


class PolicyPairs:
    """Methods for vLLM's worker; `self` is the worker, so names must not clash with its own."""

    model_runner: Any
    add_lora: Any

    def earl_load_pairs(self, name: str, number: int, folder: str, manifest_json: str) -> str:
        """Load a version's pairs from the folder; what is wrong with those that the layers then
        hold, or nothing.

        An exception would leave answers of other ranks behind that nobody reads.
        """
        from vllm.lora.request import LoRARequest

        manifest = WeightsManifest.model_validate_json(manifest_json)
        try:
            self.add_lora(LoRARequest(name, number, folder))
            manager = self.model_runner.get_model().lora_manager
            return _problem(manager, number, manifest)
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def _problem(manager: Any, number: int, manifest: WeightsManifest) -> str:
    """Compare each layer's slot with the published pairs, bit for bit.

    The layer cuts and places these itself, which changes nothing where they are there already.
    """
    adapter = manifest.adapter
    assert adapter is not None
    given = _by_module(manager, open_weights(manifest, verify_digest=True))
    slot = manager.lora_index_to_id.index(number)
    parts = {name: manager.packed_modules.get(name, [name]) for name in manager.modules}
    absent = given.keys() - {part for each in parts.values() for part in each}
    if absent:
        return f"vLLM takes no pairs for {', '.join(sorted(absent))}"
    for name, layer in manager.modules.items():
        buffers = *layer.lora_a_stacked, *layer.lora_b_stacked
        held = [buffer[slot].clone() for buffer in buffers]
        _place(layer, slot, _sides(layer, [given.get(part) for part in parts[name]], adapter.scale))
        if not all(torch.equal(old, new[slot]) for old, new in zip(held, buffers, strict=True)):
            return f"the pairs that {name} holds are not the published ones"
    return ""


def _by_module(manager: Any, weights: Mapping[str, torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """A and B by the names of vLLM's modules, before these are packed."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    mapper = mapper and mapper.get_rename_mapper()
    sides: dict[str, list[torch.Tensor]] = {}
    for pair, tensor in weights.items():
        module, is_a = parse_fine_tuned_lora_name(pair, mapper)
        sides.setdefault(module, [tensor, tensor])[0 if is_a else 1] = tensor
    return sides


def _sides(layer: Any, pairs: list[list[torch.Tensor] | None], scale: float) -> _Sides:
    """The layer's A and B in its dtype, as vLLM makes them: B is multiplied by the factor."""
    dtype = layer.lora_a_stacked[0].dtype
    a = [None if pair is None else pair[0].to(dtype) for pair in pairs]
    b = [None if pair is None else pair[1].to(dtype, copy=True) for pair in pairs]
    for each in b:
        if each is not None and scale != 1:
            each *= scale
    return a, b


def _place(layer: Any, slot: int, sides: _Sides) -> None:
    a, b = sides
    if not any(each is not None for each in a):
        layer.reset_lora(slot)
    elif len(a) == 1:
        layer.set_lora(slot, a[0], b[0])
    else:
        layer.set_lora(slot, a, b)


Rows = torch.Tensor | slice


def install_cpu_products() -> None:
    """Replace the two products in vLLM's class for CPUs by one for each adapter of a step.

    vLLM 0.32 gathers a copy of A and of B for every token, and takes those of the last adapter for
    a token that has none, whose index is -1.
    """
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
