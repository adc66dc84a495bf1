"""vLLM's own layers as one rank of several has them, without the other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

HIDDEN, INNER, HEADS, KEY_HEADS, WORDS = 64, 192, 8, 2, 128


@contextmanager
def one_of(ranks: int, rank: int) -> Iterator[None]:
    """Layers made inside take themselves for those of this rank."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    group = SimpleNamespace(world_size=ranks, rank_in_group=rank)
    with (
        patch.object(parallel_state, "_TP", group),
        set_current_vllm_config(VllmConfig()),
    ):
        yield


class Layers(torch.nn.Module):
    """One of each kind of layer that tensor parallelism cuts, and one that it does not."""

    def __init__(self) -> None:
        from vllm.model_executor.layers.layernorm import RMSNorm
        from vllm.model_executor.layers.linear import (
            MergedColumnParallelLinear,
            QKVParallelLinear,
            RowParallelLinear,
        )
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        super().__init__()
        self.embed = VocabParallelEmbedding(WORDS, HIDDEN)
        self.qkv = QKVParallelLinear(HIDDEN, HIDDEN // HEADS, HEADS, KEY_HEADS, bias=False)
        self.gate_up = MergedColumnParallelLinear(HIDDEN, [INNER, INNER], bias=False)
        self.down = RowParallelLinear(INNER, HIDDEN, bias=False)
        self.norm = RMSNorm(HIDDEN)

        generator = torch.Generator().manual_seed(2)
        self.inputs = {
            f"{name}.weight": torch.randn(4, layer.input_size_per_partition, generator=generator)
            for name, layer in self._linear().items()
        }

    def process(self) -> None:
        """What vLLM does once the first weights are loaded."""
        for layer in self.children():
            if hasattr(layer, "quant_method"):
                layer.quant_method.process_weights_after_loading(layer)

    def outputs(self) -> dict[str, torch.Tensor]:
        """What the linear layers make of `inputs`, before ranks add up theirs."""
        return {
            f"{name}.weight": layer.quant_method.apply(layer, self.inputs[f"{name}.weight"])
            for name, layer in self._linear().items()
        }

    def _linear(self) -> dict[str, Any]:
        return {"qkv": self.qkv, "gate_up": self.gate_up, "down": self.down}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """As vLLM's models do it, each shard of a packed layer by its number."""
        packed: dict[str, tuple[str, Any]] = {
            **{f"{each}.weight": ("qkv.weight", each) for each in "qkv"},
            "gate.weight": ("gate_up.weight", 0),
            "up.weight": ("gate_up.weight", 1),
        }
        loaded = set()
        for name, tensor in weights:
            target, *shard = packed.get(name, (name,))
            parameter: Any = self.get_parameter(target)
            load = getattr(parameter, "weight_loader", None)
            if load is None:
                parameter.data.copy_(tensor)
            else:
                load(parameter, tensor, *shard)
            loaded.add(target)
        return loaded


def whole_weights() -> dict[str, torch.Tensor]:
    """What the layers of all ranks together hold, under the names that `load_weights` takes."""
    generator = torch.Generator().manual_seed(1)
    keys = KEY_HEADS * HIDDEN // HEADS
    shapes = {
        "embed": (WORDS, HIDDEN), "q": (HIDDEN, HIDDEN), "k": (keys, HIDDEN), "v": (keys, HIDDEN),
        "gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER), "norm": (HIDDEN,),
    }  # fmt: skip
    return {
        f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()
    }


def own_slices(weights: dict[str, torch.Tensor], ranks: int, rank: int) -> dict[str, torch.Tensor]:
    """What a rank should hold of them, under the layers' names."""
    parts = {
        name: tensor
        if name == "norm.weight"
        else tensor.chunk(ranks, dim=1 if name == "down.weight" else 0)[rank]
        for name, tensor in weights.items()
    }
    return {
        "embed.weight": parts["embed.weight"],
        "qkv.weight": torch.cat([parts[f"{each}.weight"] for each in "qkv"]),
        "gate_up.weight": torch.cat([parts["gate.weight"], parts["up.weight"]]),
        "down.weight": parts["down.weight"],
        "norm.weight": parts["norm.weight"],
    }


class Reads(TorchDispatchMode):
    """Counts the bytes that are read from the tensors it watches, by whatever makes no view."""

    def __init__(self) -> None:
        super().__init__()
        self._memories: set[int] = set()
        self.bytes = 0

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count what is read from these, too."""
        self._memories |= {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: Any = None
    ) -> Any:
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        # Before it reads, vLLM counts what would be copied into parameters without memory.
        if not function.is_view and not any(each.is_meta for each in tensors):
            for each in tensors:
                if each.untyped_storage().data_ptr() in self._memories:
                    self.bytes += each.nbytes
        return function(*arguments, **(named or {}))
