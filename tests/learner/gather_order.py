"""When the parameters of each unit are asked for, and when it computes: on rank 0 of eight.

Fake tensors compute nothing, and raise where a program reads a number from the device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.learner.attention.attention_plan import SampleBoundaries
from earl_core.learner.model import PackedTensors, checkpoint_activations, settle
from earl_core.learner.parallel.mesh import UpdateMesh
from earl_core.learner.parallel_model import parallelize
from tests.learner.helpers import build_model

LAYERS = 5
TOKENS = 64


class Gathers(TorchDispatchMode):
    """Counts the all-gathers that are begun inside the context."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += "allgather" in str(function)
        return function(*args, **(kwargs or {}))


def begun(scratch: Path) -> dict[str, list[tuple[int, int]]]:
    """In the order of computation, each layer and how many all-gathers of its pass were begun.

    In the backward pass a layer computes first when what was not kept is computed again.
    """
    dist.init_process_group("fake", rank=0, world_size=8)
    mesh = UpdateMesh(StageDeployment("update", shard=8), 0, torch.device("cpu"))
    mesh._connect()
    config = build_model("llama").config
    config.num_hidden_layers, config.tie_word_embeddings = LAYERS, False
    with FakeTensorMode(allow_non_fake_inputs=True), Gathers() as gathers:
        model = LlamaForCausalLM(config)
        settle(model)
        checkpoint_activations(model, "full")
        parallel = parallelize(model, mesh, mixed=True)
        places = torch.zeros(TOKENS, dtype=torch.int64)
        packed = PackedTensors(
            places, places, SampleBoundaries.from_lengths([TOKENS]), places[1:], places[1:]
        )
        seen: list[tuple[int, int]] = []
        for number, layer in enumerate(model.model.layers):
            layer.mlp.gate_proj.register_forward_hook(
                lambda *_, number=number: seen.append((number, gathers.count))
            )
        passes = {}
        for _ in range(2):
            # The second microbatch finds the units as every later one does.
            seen.clear()
            gathers.count = 0
            logprobs, _ = parallel.module(packed, 1.0, "none")
            passes["forward"] = list(seen)
            seen.clear()
            gathers.count = 0
            logprobs.sum().backward()
            passes["backward"] = list(seen)
    assert all(parameter.grad is not None for parameter in model.parameters())
    return passes
