"""The part of vLLM's workers that holds an adapter's pairs: load them, and read them back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

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
