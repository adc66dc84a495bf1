"""Peak memory of an update on many ranks, from fake tensors: their sizes are real, and no data is.

One process stands for rank 0; its process group only says that it has the others. What is counted
are storages, so that views are free and what FSDP2 frees and takes again is seen. Head and chunks
are a GPU's, all else a CPU's, whose attention keeps what a GPU's does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from earl_core.config.model import AdapterConfig
from earl_core.config.update import UpdateConfig
from earl_core.deployment.shapes import AdapterShape, ModelShape
from earl_core.deployment.stage_deployment import CHECKPOINTING, Checkpointing, StageDeployment
from earl_core.learner import logit_passes, token_logprobs
from earl_core.learner.attention.attention_plan import SampleBoundaries
from earl_core.learner.attention.context_parallel import ContextCut, ContextGroup, PackExchange
from earl_core.learner.compiled_layers import compile_layers
from earl_core.learner.data.prefix_tree import separate
from earl_core.learner.low_rank import attach_pairs, entry_of, pairs_of
from earl_core.learner.model import PackedTensors, checkpoint_activations, settle
from earl_core.learner.parallel.expert_mesh import expert_mesh, forget_experts
from earl_core.learner.parallel.expert_parallel import _Experts
from earl_core.learner.parallel.mesh import UpdateMesh
from earl_core.learner.parallel_model import ParallelModel, parallelize
from earl_core.learner.state.optimizer import PolicyOptimizer
from earl_core.selector.model.catalogue import MODELS
from earl_core.selector.model.sizes import positions_at_a_time
from earl_core.tensors.slices import local_part
from tests.selector.released import RELEASED
from tools.shapes import Shape

RUNG_TOKENS = 8192
MICROBATCHES = 2
"""The second one's gradients are added to those of the first, which makes it the larger."""


class Held(TorchDispatchMode):
    """The bytes of all storages that operators made inside the context, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled layers are counted too."""
        return True

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
        if any(issubclass(each, DTensor) for each in types):
            # Its own operators, on local tensors, are what is counted.
            return NotImplemented
        found = function(*args, **(kwargs or {}))
        for each in tree_iter(found):
            if isinstance(each, torch.Tensor):
                self.count(each.untyped_storage())
        return found


def shape_of(model: str, **sizes: int) -> ModelShape:
    """A known shape with other sizes; a copy would keep what was worked out for the old ones."""
    if model in RELEASED:
        return ModelShape.from_config(released(model, sizes["layers"]))
    return ModelShape(**{**MODELS[model].model_dump(), **sizes})


def released(model: str, layers: int) -> dict[str, Any]:
    """A released configuration of so many layers."""
    return {**RELEASED[model], "num_hidden_layers": layers}


class Case(NamedTuple):
    """A rank's update: of `layers` layers of a known shape."""

    model: str
    layers: int
    deployment: StageDeployment
    mixed: bool = True
    compiled: bool = False
    adapter: AdapterShape | None = None

    @property
    def shape(self) -> ModelShape:
        return shape_of(self.model, layers=self.layers).with_adapter(self.adapter)

    @property
    def config(self) -> PretrainedConfig:
        if self.model not in RELEASED:
            return Shape.of("", self.shape).config(self.shape.max_positions)
        raw = released(self.model, self.layers)
        return CONFIG_MAPPING[raw["model_type"]](**raw)

    def __str__(self) -> str:
        precision = "bf16" if self.mixed else "fp32"
        compiled = " compiled" if self.compiled else ""
        pairs = f" rank {self.adapter.rank}" if self.adapter else ""
        pairs += f" {' '.join(self.adapter.targets)}" if self.adapter else ""
        return f"{self.model} {self.layers} {precision}{compiled}{pairs} {self.deployment.label}"


def _case(
    model: str,
    tokens: int,
    rung: Checkpointing = "full",
    *,
    layers: int = 4,
    mixed: bool = True,
    compiled: bool = False,
    adapter: AdapterShape | None = None,
    **mesh: int,
) -> Case:
    deployment = StageDeployment(
        "update", max_tokens_per_microbatch=tokens, activation_checkpointing=rung, **mesh
    )
    return Case(model, layers, deployment, mixed, compiled, adapter)


_PAIRS = AdapterShape(rank=16)
"""Pairs that are trained beside a frozen model."""

FEW = [
    _case("qwen2.5-0.5b", 8192, "none"),
    _case("qwen2.5-7b", 8192, tensor_parallel=2, shard=4),
    _case("qwen2.5-7b", 16384, adapter=_PAIRS),
]
"""Whole layers, cut ones, and pairs, for the fast tests."""

SEVEN_BILLION = _case("qwen2.5-7b", 16384, layers=28, shard=8)
CASES = [
    SEVEN_BILLION,
    _case("qwen2.5-72b", 65536, tensor_parallel=4, context_parallel=4, shard=8),
    _case("qwen2.5-7b", 16384, shard=8, compiled=True, adapter=_PAIRS),
    _case("llama-3.1-8b", 8192, "none", mixed=False, shard=8, adapter=_PAIRS),
]
"""One whole depth, which says that the others, of four layers, tell of all."""

MIXED = [
    _case("qwen3-30b-a3b", 8192, shard=8),
    _case("qwen3-30b-a3b", 8192, "none", shard=8),
    _case("qwen3-30b-a3b", 8192, "selective", shard=8),
    _case("glm-4.5-air", 16384, shard=16),
    _case("mixtral-8x7b", 16384, context_parallel=2, shard=4),
    _case("mixtral-8x7b", 8192, "none", shard=8),
    _case("qwen3.5-9b", 1024, "none", shard=8),
    _case("qwen3.5-35b-a3b", 512, shard=8),
]
"""Mixtures of experts, and models with states."""

DIVIDED = [
    _case("qwen3-30b-a3b", 8192, replicas=2, shard=4, expert_parallel=8),
    _case("glm-4.5-air", 8192, replicas=8, expert_parallel=8),
    _case("mixtral-8x7b", 16384, context_parallel=2, shard=4, expert_parallel=2),
    _case("mixtral-8x7b", 4096, "none", shard=8, expert_parallel=8),
]
"""Mixtures whose experts are divided over ranks."""

MORE = [
    _case("qwen2.5-1.5b", 4096, "none", shard=2),
    _case("qwen2.5-7b", 16384, "selective", shard=8),
    _case("qwen2.5-72b", 16384, "none", tensor_parallel=4, shard=8, compiled=True),
    _case("qwen2.5-72b", 16384, "none", tensor_parallel=4, shard=2, adapter=_PAIRS),
    _case("llama-3.1-8b", 8192, "none", mixed=False, shard=8),
    _case("qwen2.5-1.5b", 16384, "full", shard=2, compiled=True),
    _case("qwen2.5-0.5b", 16384, shard=4),
    _case("qwen2.5-1.5b", 4096),
    _case("qwen2.5-7b", 16384, "none", shard=8),
    _case("qwen2.5-7b", 16384, "none", shard=8, compiled=True),
    _case("qwen2.5-7b", 4096, shard=64),
    _case("qwen2.5-7b", 32768, context_parallel=2, shard=4),
    _case("qwen2.5-32b", 16384, shard=8),
    _case("qwen2.5-72b", 8192, shard=64),
    _case("qwen2.5-72b", 16384, tensor_parallel=8, shard=8),
    _case("qwen2.5-72b", 16384, "none", tensor_parallel=4, shard=8),
    _case("qwen2.5-72b", 16384, "selective", tensor_parallel=4, shard=8),
    _case("qwen2.5-72b", 16384, "full", tensor_parallel=4, shard=8, compiled=True),
    _case("llama-3.1-8b", 131072, context_parallel=8),
    _case("qwen2.5-0.5b", 8192, "none", adapter=_PAIRS),
    _case("qwen2.5-7b", 16384, "selective", adapter=_PAIRS),
    _case("qwen2.5-7b", 16384, "none", compiled=True, adapter=_PAIRS),
    _case("qwen2.5-7b", 32768, context_parallel=2, shard=2, adapter=_PAIRS),
    _case("qwen2.5-7b", 16384, "none", adapter=AdapterShape(rank=64, targets=("q_proj", "v_proj"))),
    _case("qwen2.5-32b", 16384, shard=4, adapter=_PAIRS),
]
"""Further pairs of what the others vary one at a time."""


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """What the head holds on a GPU, whose products need no copy in 16 bits; meshes that are joined
    while tensors are fake, which asks real ones for their numbers; and compiled layers that keep
    what inductor would have them keep, and run operator by operator; and divided experts that have
    as many rows each, because nobody counts fake ones."""

    def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        out.zero_()

    def join(meshes: list[DeviceMesh]) -> DeviceMesh:
        with unset_fake_temporarily():
            return joined(meshes)

    def partition(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        graph = aot_autograd(
            fw_compiler=lambda graph, _: graph.forward,
            partition_fn=min_cut_rematerialization_partition,
        )
        return compiling(function, backend=graph, dynamic=False)

    def count(rows: torch.Tensor, minlength: int) -> torch.Tensor:
        with unset_fake_temporarily():
            return torch.full((minlength,), len(rows) // minlength)

    def counts(experts: Any, sent: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int]]:
        with unset_fake_temporarily():
            rows = sent.view(-1, experts.held)
            each = rows.sum(dim=1).tolist()
        return rows, each, each

    joined, compiling = DeviceMesh._concatenate, torch.compile
    with (
        patch.object(token_logprobs, "multiply", multiply),
        patch.object(logit_passes, "_LOGITS_PER_STEP", logit_passes._LOGITS_PER_STEP_OF_A_GPU),
        patch.object(DeviceMesh, "_concatenate", staticmethod(join)),
        patch.object(torch, "compile", partition),
        patch.object(torch, "bincount", count),
        patch.object(_Experts, "counts", counts),
    ):
        yield


def few_peaks(scratch: Path) -> dict[str, int]:
    """The peak of each of `FEW`, bytes."""
    return {str(case): _peak(case) for case in FEW}


def most_peaks(scratch: Path) -> dict[str, int]:
    """The peak of each of `CASES`, bytes."""
    return {str(case): _peak(case) for case in CASES}


def mixed_peaks(scratch: Path) -> dict[str, int]:
    """The peak of each of `MIXED`, bytes."""
    return {str(case): _peak(case) for case in MIXED}


def divided_peaks(scratch: Path) -> dict[str, int]:
    """The peak of each of `DIVIDED`, bytes."""
    return {str(case): _peak(case) for case in DIVIDED}


def more_peaks(scratch: Path) -> dict[str, int]:
    """The peak of each of `MORE`, bytes."""
    return {str(case): _peak(case) for case in MORE}


def _peak(case: Case) -> int:
    try:
        with _as_on_a_gpu():
            return update_peak(case.shape, case.deployment, case.mixed, case.compiled, case.config)
    finally:
        forget_experts()
        dist.destroy_process_group()


def update_peak(
    shape: ModelShape,
    deployment: StageDeployment,
    mixed: bool = True,
    compiled: bool = False,
    config: PretrainedConfig | None = None,
) -> int:
    """Bytes of rank 0 in the microbatches of a later step: parts, moments, gradients and what is
    made on the way. One sample fills a microbatch, and all of it is trained.
    """
    dist.init_process_group("fake", rank=0, world_size=deployment.ranks)
    mesh = UpdateMesh(deployment, 0, torch.device("cpu"))
    mesh._connect()
    mesh.experts = expert_mesh(deployment, "cpu")
    config = config or Shape.of("", shape).config(shape.max_positions)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        settle(model)
        if shape.adapter is not None:
            _attach(model, shape.adapter, torch.bfloat16 if mixed else torch.float32)
        checkpoint_activations(model, deployment.activation_checkpointing)
        chunk = deployment.logits_chunk_tokens or positions_at_a_time(
            shape.vocabulary / deployment.tensor_parallel, gpu=True
        )
        parallel = parallelize(model, mesh, mixed=mixed, chunk_tokens=chunk)
        if compiled:
            torch._dynamo.reset()
            compile_layers(model)
        with Held() as held:
            for parameter in model.parameters():
                held.count(local_part(parameter).untyped_storage())
            _compute(parallel, held, deployment)
    return held.peak


def _attach(model: PreTrainedModel, adapter: AdapterShape, base: torch.dtype) -> None:
    wanted = AdapterConfig(rank=adapter.rank, targets=list(adapter.targets) or "all-linear")
    attach_pairs(model, entry_of(wanted, model, ""), base)
    for name, empty in pairs_of(model).items():
        module, _, side = name.rpartition(".")
        setattr(model.get_submodule(module), side, nn.Parameter(torch.zeros(empty.shape)))


def _compute(parallel: ParallelModel, held: Held, deployment: StageDeployment) -> None:
    named = {n: p for n, p in parallel.model.named_parameters() if p.requires_grad}
    optimizer = PolicyOptimizer(named.items(), UpdateConfig())
    optimizer._make_state(list(named))
    tree, exchange = separate([deployment.max_tokens_per_microbatch]), None
    place = ContextGroup.of(parallel.mesh)
    if place is not None:
        exchange = PackExchange(place, ContextCut.even(tree.size, place.size))
    boundaries = SampleBoundaries.from_tree(tree, exchange=exchange)
    places = torch.zeros(tree.size // deployment.context_parallel, dtype=torch.int64)
    packed = PackedTensors(places, places, boundaries, places[1:], places[1:])
    for number in range(1, MICROBATCHES + 1):
        parallel.begin_microbatch(last=number == MICROBATCHES)
        logprobs, _ = parallel.module(packed, 1.0, "none")
        logprobs.sum().backward()  # type: ignore[no-untyped-call]
        del logprobs
    assert named
    for parameter in named.values():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32


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
            shape = shape_of("qwen2.5-1.5b", layers=layers, vocabulary=4096)
            peaks.setdefault(rung, []).append(update_peak(shape, deployment))
            dist.destroy_process_group()
    return peaks
