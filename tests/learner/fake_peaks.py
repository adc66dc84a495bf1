"""Peak memory of an update on many ranks, from fake tensors: their sizes are real, and no data is.

One process stands for rank 0; its process group only says that it has the others. What is counted
are storages, so that views are free and what FSDP2 frees and takes again is seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import Qwen2Config, Qwen2ForCausalLM

from earl_core.cluster.stage_deployment import CHECKPOINTING, StageDeployment
from earl_core.config.update import UpdateConfig
from earl_core.deployment.shapes import ModelShape
from earl_core.learner.attention.attention_plan import SampleBoundaries
from earl_core.learner.model import PackedTensors, checkpoint_activations, settle
from earl_core.learner.parallel.mesh import UpdateMesh
from earl_core.learner.parallel_model import ParallelModel, parallelize
from earl_core.learner.state.optimizer import PolicyOptimizer
from earl_core.selector.model.catalogue import MODELS
from earl_core.tensors.slices import local_part

RUNG_TOKENS = 8192
MICROBATCHES = 2
"""The second one's gradients are added to those of the first, which makes it the larger."""


class Held(TorchDispatchMode):
    """The bytes of all storages that operators made inside the context, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __enter__(self) -> Held:
        self._resize: Callable[..., Any] = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            self._resize(storage, size)
            self.count(storage)
            return storage

        torch.UntypedStorage.resize_ = resize
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*raised)

    def count(self, storage: torch.UntypedStorage) -> None:
        """Know of a storage, or of its new size."""
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._forget, key)
        self.now += storage.nbytes() - self._sizes[key]
        self._sizes[key] = storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        for each in tree_iter(found):
            if isinstance(each, torch.Tensor):
                self.count(each.untyped_storage())
        return found


def update_peak(shape: ModelShape, deployment: StageDeployment) -> int:
    """Bytes of rank 0 in the microbatches of a later step: parts, moments, gradients and what is
    made on the way. One sample fills a microbatch, and all of it is trained.
    """
    dist.init_process_group("fake", rank=0, world_size=deployment.ranks)
    mesh = UpdateMesh(deployment, 0, torch.device("cpu"))
    mesh._connect()
    config = Qwen2Config(
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.attention_heads,
        num_key_value_heads=shape.key_value_heads,
        intermediate_size=shape.intermediate_size,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied_embeddings,
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = Qwen2ForCausalLM(config)
        settle(model)
        checkpoint_activations(model, deployment.activation_checkpointing)
        parallel = parallelize(model, mesh, mixed=True)
        with Held() as held:
            for parameter in model.parameters():
                held.count(local_part(parameter).untyped_storage())
            _compute(parallel, held, deployment)
    return held.peak


def _compute(parallel: ParallelModel, held: Held, deployment: StageDeployment) -> None:
    named = dict(parallel.model.named_parameters())
    optimizer = PolicyOptimizer(named.items(), UpdateConfig())
    optimizer._make_state(list(named))
    tokens = deployment.max_tokens_per_microbatch // deployment.context_parallel
    places = torch.zeros(tokens, dtype=torch.int64)
    packed = PackedTensors(
        places, places, SampleBoundaries.from_lengths([tokens]), places[1:], places[1:]
    )
    for number in range(1, MICROBATCHES + 1):
        parallel.begin_microbatch(last=number == MICROBATCHES)
        logprobs, _ = parallel.module(packed, 1.0, "none")
        logprobs.sum().backward()  # type: ignore[no-untyped-call]
        del logprobs
    for parameter in named.values():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32


def seven_billion(scratch: Path) -> int:
    """Qwen2.5-7B on eight shards, 16,384 tokens, with activation checkpointing."""
    deployment = StageDeployment(
        "update", shard=8, max_tokens_per_microbatch=16384, activation_checkpointing="full"
    )
    return update_peak(MODELS["qwen2.5-7b"], deployment)


def rungs(scratch: Path) -> dict[str, list[int]]:
    """The peak of each rung of activation checkpointing, of two and of four layers: Qwen2.5-1.5B
    with a small vocabulary, two shards."""
    peaks: dict[str, list[int]] = {}
    for rung in CHECKPOINTING:
        deployment = StageDeployment(
            "update",
            shard=2,
            max_tokens_per_microbatch=RUNG_TOKENS,
            activation_checkpointing=rung,
        )
        for layers in (2, 4):
            sizes = {"layers": layers, "vocabulary": 4096}
            shape = MODELS["qwen2.5-1.5b"].model_copy(update=sizes)
            peaks.setdefault(rung, []).append(update_peak(shape, deployment))
            dist.destroy_process_group()
    return peaks
