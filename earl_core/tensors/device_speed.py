"""Speed of a device: measured once, where no data sheet of it is known.

Each part is repeated for half a second, and its fastest round counts: a device that others use, or
whose clock still rises, must not look slower than it is. The results are rates that a program
reaches, below those of a data sheet.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from earl_core.cluster.rank_process import WorkerContext
from earl_core.deployment.shapes import DeviceFigures
from earl_core.system.errors import ConfigError
from earl_core.system.hardware import bf16_instructions
from earl_core.system.memory import memory_limit

PART_SECONDS = 0.5
"""Seconds of each of five parts, besides warming up."""

_PASSES = 50
"""Passes through a layer in a round, queued one behind the other, as steps are."""

_HIDDEN, _HEADS = 128, 4


class DeviceSpeed:
    """The rank of the short-lived worker group that measures the first device it sees."""

    def __init__(self, context: WorkerContext, deployment: dict[str, Any], *, device: str) -> None:
        self._device = device

    def measure(self) -> dict[str, Any]:
        """The dumped `DeviceFigures`. Raises `ConfigError` where torch sees no such device."""
        if self._device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "torch sees no GPU, although the driver has one",
                remedy="see `earl doctor`: the driver may be too old for torch's CUDA, or torch a "
                "build for CPUs",
            )
        return measure(torch.device(self._device)).model_dump(mode="json")


def measure(device: torch.device) -> DeviceFigures:
    """The figures of a device, in a few seconds. The figures of a CPU are those of all threads of
    torch, and its host's memory is its own."""
    cuda = device.type == "cuda"
    total = torch.cuda.mem_get_info(device)[1] if cuda else memory_limit()
    in_memory = _memory_bandwidth(device)
    to_host = _host_bandwidth(device) if cuda else in_memory
    flops, float32 = (_flops(device, kind) for kind in (torch.bfloat16, torch.float32))
    return DeviceFigures(
        name=torch.cuda.get_device_name(device) if cuda else "CPU",
        nccl=cuda,
        memory_bytes=total,
        flops=flops,
        float32_flops=float32,
        memory_bandwidth=in_memory,
        link_bandwidth=to_host,
        host_bandwidth=to_host,
        peer_bandwidth=to_host,
        nvlink_gpus=1,
        layer_seconds=_layer_seconds(device, torch.bfloat16 if flops >= float32 else torch.float32),
        source=f"measured by torch {torch.__version__}; no data sheet is known",
    )


@cache
def bf16_is_fast(device: torch.device) -> bool:
    """Tell whether bf16 takes no longer than float32, for code that computes without a run's
    controller, which asks all hosts."""
    if device.type != "cpu":
        return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
    fast = bool(bf16_instructions())
    return fast or _flops(device, torch.bfloat16) >= _flops(device, torch.float32)


def _fastest(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of the fastest of all rounds that `PART_SECONDS` have room for, three at least."""
    found: list[float] = []
    work()
    ended = time.perf_counter() + PART_SECONDS
    while len(found) < 3 or time.perf_counter() < ended:
        _wait(device)
        began = time.perf_counter()
        work()
        _wait(device)
        found.append(time.perf_counter() - began)
    return min(found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def _flops(device: torch.device, kind: torch.dtype) -> float:
    """The three products of a square linear layer, forward and backward, which differ in what is
    transposed: without instructions for bf16 that makes them differ several times."""
    size = 8192 if device.type == "cuda" else 256
    states, weight, slopes = (torch.randn(size, size, device=device, dtype=kind) for _ in range(3))

    def products() -> None:
        F.linear(states, weight)
        torch.mm(slopes, weight)
        torch.mm(slopes.t(), states)

    return 6.0 * size**3 / _fastest(device, products)


def _memory_bandwidth(device: torch.device) -> float:
    """Bytes read and written by a copy of a tensor that no cache holds."""
    size = 2**30 if device.type == "cuda" else 2**27
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    return 2.0 * size / _fastest(device, lambda: into.copy_(source))


def _host_bandwidth(device: torch.device) -> float:
    """Bytes copied from pinned memory of the host."""
    source = torch.zeros(2**28, dtype=torch.uint8, pin_memory=True)
    into = torch.empty(source.shape, dtype=torch.uint8, device=device)
    copying = _fastest(device, lambda: into.copy_(source, non_blocking=True))
    return source.numel() / copying


@torch.no_grad()
def _layer_seconds(device: torch.device, kind: torch.dtype) -> float:
    """Return the seconds of a pass of one token through a decoder layer too small to be work: the
    time that starting its operations takes."""
    weights = [
        torch.randn(shape, device=device, dtype=kind)
        for shape in (
            (3 * _HIDDEN, _HIDDEN),
            (_HIDDEN, _HIDDEN),
            (4 * _HIDDEN, _HIDDEN),
            (4 * _HIDDEN, _HIDDEN),
            (_HIDDEN, 4 * _HIDDEN),
        )
    ]
    state = torch.randn(1, 1, _HIDDEN, device=device, dtype=kind)

    def layer(hidden: torch.Tensor) -> torch.Tensor:
        together, out, gate, up, down = weights
        parts = F.linear(F.rms_norm(hidden, (_HIDDEN,)), together).chunk(3, dim=-1)
        query, key, value = (part.view(1, 1, _HEADS, -1).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + F.linear(attended.transpose(1, 2).reshape(1, 1, _HIDDEN), out)
        normed = F.rms_norm(hidden, (_HIDDEN,))
        return hidden + F.linear(F.silu(F.linear(normed, gate)) * F.linear(normed, up), down)

    def passes() -> None:
        hidden = state
        for _ in range(_PASSES):
            hidden = layer(hidden)

    return _fastest(device, passes) / _PASSES
