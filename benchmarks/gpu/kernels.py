"""Kernels that torch.compile makes for a GPU, counted where no GPU is.

A layer's graphs are traced as ever. Inductor's work on them for an H200 is then done up to its
schedule: which operators become one kernel, what each kernel reads and writes, and which products
are left to cuBLAS. No kernel is generated, so neither a GPU nor Triton is needed: inductor is told
the GPU's properties, and the graphs' tensors are fake ones that say they are on it. (A schedule for
the CPU is another one: it leaves a norm's second reduction and the parts of the rotary embedding
kernels of their own.)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo import device_interface
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import compile_fx, scheduler
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.utils import get_fused_kernel_name
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from benchmarks.gpu.operators import Recorder

GPU = torch.device("cuda", 0)
# Of an H200, by NVIDIA's documentation, as far as a schedule asks.
H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=141 * 10**9,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
)


@dataclass(frozen=True)
class Kernel:
    """Work of one call of a kernel."""

    name: str
    flops: float
    bytes: float


class CountedCompiler:
    """A backend of torch.compile whose graphs run operator by operator, unbooked, while the kernels
    that they would be on a GPU are booked. graphs: how many it was given.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with self._recorder.paused():
            return compile_fx.compile_fx(graph, inputs, inner_compile=self._compile)

    def _compile(
        self,
        graph: torch.fx.GraphModule,
        inputs: Sequence[Any],
        *,
        is_backward: bool = False,
        get_decomp_fn: Callable[..., Any],
        **unused: Any,
    ) -> Callable[[list[Any]], Any]:
        self.graphs += 1
        kernels = scheduled(graph, backward=is_backward, decompositions=get_decomp_fn)

        def run(arguments: list[Any]) -> Any:
            for kernel in kernels:
                self._recorder.ledger.add(kernel.name, kernel.flops, kernel.bytes)
            with self._recorder.paused():
                return graph.forward(*arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def scheduled(
    graph: torch.fx.GraphModule, *, backward: bool, decompositions: Callable[..., Any]
) -> list[Kernel]:
    """The kernels of a traced graph by inductor's schedule for an H200."""
    graph = copy.deepcopy(graph)
    inputs, mode = _moved(graph)
    with ExitStack() as stack:
        for each in (
            _inductor_for_gpu(),
            tracing(TracingContext(mode)),
            V.set_debug_handler(DebugContext()),
            V.set_fake_mode(mode),
            torch.no_grad(),
        ):
            stack.enter_context(each)
        lowered = GraphLowering(
            graph,
            example_inputs=inputs,
            shape_env=mode.shape_env,
            is_backward=backward,
            get_decomp_fn=decompositions,
        )
        with V.set_graph_handler(lowered), V.set_extern_kernel_nodes([]):
            lowered.run(*inputs)
            lowered.init_wrapper_code()
            lowered._update_scheduler()
            return list(_kernels(lowered.scheduler.nodes))


def _moved(graph: torch.fx.GraphModule) -> tuple[list[torch.Tensor], FakeTensorMode]:
    """Do the passes over the graph in place and move it to the GPU; inputs there."""
    compile_fx.view_to_reshape(graph)
    compile_fx.record_original_output_strides(graph)
    places = graph.graph.find_nodes(op="placeholder")
    traced = detect_fake_mode([node.meta["val"] for node in places])
    with V.set_fake_mode(traced), torch.no_grad():
        compile_fx._recursive_post_grad_passes(graph, is_inference=False)
    mode = FakeTensorMode()
    with mode:
        inputs = [
            torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=GPU)
            for value in (node.meta["val"] for node in places)
        ]
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": GPU}
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*inputs)
    return inputs, mode


def _kernels(nodes: Sequence[Any]) -> Iterator[Kernel]:
    for node in nodes:
        moved = sum(node.get_read_write_buffer_accesses(True, True).values())
        parts = node.get_nodes()
        if isinstance(node, scheduler.NopKernelSchedulerNode):
            continue
        if isinstance(node, scheduler.ExternKernelSchedulerNode):
            called = str(getattr(node.node, "python_kernel_name", None) or node.get_name())
            dtype = str(node.node.get_dtype()).removeprefix("torch.")
            yield Kernel(
                f"{called.rpartition('.')[2]} {dtype}", float(node.estimate_flops() or 0), moved
            )
        else:
            yield Kernel(get_fused_kernel_name(parts, "original_aten"), 0.0, moved)


@contextmanager
def _inductor_for_gpu() -> Iterator[None]:
    """Let inductor plan for the GPU, as it does where it sees one."""
    changes: list[Any] = [
        # It asks only because it is about to generate code.
        patch.object(scheduler, "has_triton", lambda *_: True),
        patch.object(torch.cuda, "get_device_properties", lambda *_: H200),
        patch.object(torch.cuda, "get_device_capability", lambda *_: (H200.major, H200.minor)),
        patch.dict(device_interface.caching_worker_device_properties, {"cuda": [H200]}),
    ]
    for owner in (device_interface.CudaInterface, device_interface.CudaInterface.Worker):
        changes.append(
            patch.object(owner, "get_device_properties", staticmethod(lambda *_: H200), create=True)
        )
    changes.append(
        patch.object(
            device_interface.CudaInterface, "get_compute_capability", staticmethod(lambda *_: 90)
        )
    )
    DeviceProperties.create.cache_clear()
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(change)
        try:
            yield
        finally:
            DeviceProperties.create.cache_clear()
