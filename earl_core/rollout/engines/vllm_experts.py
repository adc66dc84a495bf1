"""Experts of a mixture in a live vLLM engine: packed again after new weights, and proven.

vLLM 0.32 packs experts for the kernel of a CPU when they are loaded first and never again
(`UnquantizedFusedMoEMethod._setup_kernel`), so that after a reload the kernel reads plain weights
as packed ones and nothing complains. The kernels for CUDA that keep copies of another layout are
not taken (`vllm_environment.engine_arguments`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

_PUBLISHED = re.compile(
    r"layers\.(?P<layer>\d+)\.(?:[^.]+\.)*experts\.(?:(?P<expert>\d+)\.)?"
    r"(?P<matrix>gate_up_proj|gate_proj|up_proj|down_proj|w1|w2|w3)(?:\.weight)?$"
)
_LAYER = re.compile(r"layers\.(\d+)\.")
_ROLES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda states: F.gelu(states, approximate="tanh"),
}

TOLERANCE = 0.05
"""Of an expert's output, relative to its largest value. Rounding alone gives about 0.01 in
bfloat16, weights in another order than the kernel's about 1."""


def experts_of(config: Any) -> int:
    """How many experts each routed layer has; 0 for a dense model. config: of transformers."""
    text = config.get_text_config()
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    return max(getattr(text, name, None) or 0 for name in counts)


class PublishedExperts:
    """The experts of one layer as they were published, in one tensor or in one for each expert."""

    def __init__(self, tensors: Mapping[tuple[str | None, str], torch.Tensor]) -> None:
        self._tensors = tensors

    def of(self, expert: int, transposed: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gate [I, H], up [I, H] and down [H, I] of an expert. transposed: the joined tensors are
        [E, H, 2I] and [E, I, H]."""
        if (None, "down_proj") in self._tensors:
            both = self._tensors[None, "gate_up_proj"][expert]
            down = self._tensors[None, "down_proj"][expert]
            if transposed:
                both, down = both.T, down.T
            gate, up = both.chunk(2)
            return gate, up, down
        gate, up, down = (
            self._tensors[str(expert), matrix] for matrix in ("gate_proj", "up_proj", "down_proj")
        )
        return gate, up, down


def published_experts(weights: Mapping[str, torch.Tensor]) -> dict[int, PublishedExperts]:
    """Those of each routed layer, by its number."""
    found: dict[int, dict[tuple[str | None, str], torch.Tensor]] = {}
    for name, tensor in weights.items():
        if match := _PUBLISHED.search(name):
            matrix = _ROLES.get(match["matrix"], match["matrix"])
            found.setdefault(int(match["layer"]), {})[match["expert"], matrix] = tensor
    return {layer: PublishedExperts(tensors) for layer, tensors in found.items()}


def names_of_vllm(weights: Mapping[str, torch.Tensor], model_type: str) -> dict[str, torch.Tensor]:
    """The tensors under names that vLLM's loader of such a model knows. It takes joined experts of
    all families but Mixtral's, of which it wants the names of the files, as views here."""
    if model_type != "mixtral":
        return dict(weights)
    named: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        known = name.replace(".mlp.", ".block_sparse_moe.")
        if known.endswith(".experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                prefix = known.replace("gate_up_proj", str(expert))
                named |= {f"{prefix}.w1.weight": gate, f"{prefix}.w3.weight": up}
        elif known.endswith(".experts.down_proj"):
            for expert, down in enumerate(tensor):
                named[f"{known.replace('down_proj', str(expert))}.w2.weight"] = down
        else:
            named[known] = tensor
    return named


def untrained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The biases by which routers correct their choices. They are buffers in transformers, which
    nobody trains or publishes, and parameters in vLLM, which a reload would leave undefined."""
    return {
        name: each.detach().clone()
        for name, each in model.named_parameters()
        if name.endswith("e_score_correction_bias")
    }


def renew_experts(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> float:
    """Compare the experts of a reloaded model with those that were published, pack them again where
    its kernel wants that, and send one row through each; the largest relative error against plain
    products with the published tensors.

    Raises `RuntimeError` for an expert that computes with other weights, or of which nothing can be
    proven.
    """
    layers = routed_layers(model)
    published = published_experts(weights) if layers else {}
    worst = 0.0
    for number, layer in layers.items():
        if number not in published:
            raise RuntimeError(f"no published experts are known for {layer.layer_name}")
        own = _own_experts(layer, published[number])
        _compare(layer, own)
        pack(layer)
        worst = max(worst, _error(layer, own))
    return worst


def routed_layers(model: torch.nn.Module) -> dict[int, Any]:
    """vLLM's experts of each routed layer, by its number."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    found: dict[int, Any] = {}
    for layer in model.modules():
        if isinstance(layer, RoutedExperts):
            number = _LAYER.search(layer.layer_name)
            if number is None:
                raise RuntimeError(f"{layer.layer_name} has no number")
            found[int(number[1])] = layer
    return found


def pack(layer: Any) -> None:
    """Bring its weights into the order of a kernel that was given them plain."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)


Own = dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def _own_experts(layer: Any, published: PublishedExperts) -> Own:
    """A rank's part of gate, up and down of each expert that it has, as views."""
    parallel = layer.moe_config.moe_parallel_config
    own: Own = {}
    for expert in range(layer.global_num_experts):
        if layer._map_global_expert_id_to_local_expert_id(expert) < 0:
            continue
        gate, up, down = published.of(expert, layer.is_fused_checkpoint_transposed)
        width = len(gate) // parallel.tp_size
        part = slice(parallel.tp_rank * width, (parallel.tp_rank + 1) * width)
        own[expert] = gate[part], up[part], down[:, part]
    return own


def _compare(layer: Any, own: Own) -> None:
    """Raise `RuntimeError` where an expert that was loaded, and is not packed yet, is not the
    published one, bit for bit. What an update changes is less than rounding in a product."""
    w13, w2 = layer.w13_weight, layer.w2_weight
    half = w13.shape[1] // 2
    for expert, (gate, up, down) in own.items():
        at = layer._map_global_expert_id_to_local_expert_id(expert)
        width, size = gate.shape
        held = w13[at, :width, :size], w13[at, half : half + width, :size], w2[at, :size, :width]
        for given, found in zip((gate, up, down), held, strict=True):
            if not torch.equal(given.to(found), found):
                raise RuntimeError(
                    f"after the update expert {expert} of {layer.layer_name} has other weights "
                    "than were published"
                )


def _error(layer: Any, own: Own) -> float:
    """Each row has one expert, so that an error is that of an expert."""
    weight = layer.w2_weight
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(len(own), layer.hidden_size, generator=generator).to(weight)
    ids = torch.tensor([*own], device=weight.device)[:, None]
    kind = layer.quant_method.topk_indices_dtype or torch.int32
    found = layer.quant_method.apply(
        layer, rows, torch.ones_like(ids, dtype=torch.float32), ids.to(kind), None, None
    ).float()
    activation = _ACTIVATIONS.get(layer.activation.value)
    if activation is None or layer.moe_config.has_bias:
        raise RuntimeError(f"nothing can be proven of experts with {layer.activation.value}")
    expected = []
    for row, matrices in zip(rows.float(), own.values(), strict=True):
        gate, up, down = (each.to(weight).float() for each in matrices)
        expected.append(down @ (activation(gate @ row) * (up @ row)))
    wanted = torch.stack(expected)
    errors = ((found - wanted).abs().amax(1) / wanted.abs().amax(1).clamp_min(1e-6)).tolist()
    for expert, error in zip(own, errors, strict=True):
        # NaN is an error, too.
        if not error <= TOLERANCE:
            raise RuntimeError(
                f"after the update expert {expert} of {layer.layer_name} still computes with "
                f"other weights (relative error {error:.3f})"
            )
    return max(errors)
