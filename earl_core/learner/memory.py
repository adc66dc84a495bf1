"""Memory of the learner: its peak, and one typed error for running out of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from earl_core.system import fault_points, memory
from earl_core.system.memory import (
    give_back_free_memory,
    memory_in_use,
    memory_limit,
    reset_peaks,
    resident_peak_bytes,
)

_ADVICE = (
    "lower update.max_tokens_per_microbatch, set update.activation_checkpointing, or give the "
    "stage more ranks"
)


@contextmanager
def microbatch(stage: str, iteration: int, number: int, count: int, tokens: int) -> Iterator[None]:
    """Around the work on one microbatch, numbered from 1: raises `OutOfMemory` in place of what
    the allocators of Python, of torch on the CPU and of CUDA raise. Its payload holds microbatch,
    microbatches and tokens too. The fault point `<stage>.microbatch<number>` lies in it.
    """
    doing = f"microbatch {number} of {count} of '{stage}', {tokens:,} tokens,"
    numbers = {"microbatch": number, "microbatches": count, "tokens": tokens}
    with memory.guarded(stage, doing, _ADVICE, **numbers):
        fault_points.point(f"{stage}.microbatch{number}", iteration)
        yield


@contextmanager
def guarded(stage: str) -> Iterator[None]:
    """Around all that a rank does for a stage: `OutOfMemory` names this stage, whichever part of
    the work was refused memory. Also a decorator of plain functions. Afterwards free memory goes
    back to the host where it is scarce, because other stages may need it.
    """
    try:
        with memory.guarded(stage, f"'{stage}', outside of its microbatches,", _ADVICE):
            yield
    finally:
        _give_back_what_is_scarce()


def _give_back_what_is_scarce() -> None:
    if memory_in_use() > memory_limit() / 2:
        give_back_free_memory()


class Parking:
    """Device memory of tensors, given back and taken again; their bytes wait in host memory.

    The tensors stay the objects they are, so that all who hold views of them hold them still; in
    between they must not be used.
    """

    def __init__(self) -> None:
        self._held: list[tuple[torch.UntypedStorage, torch.Tensor]] = []

    def give(self, tensors: Iterable[torch.Tensor], device_type: str = "cuda") -> int:
        """Give the memory of those on such devices back; returns its bytes."""
        storages = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.device.type == device_type and storage.nbytes():
                storages[storage.data_ptr()] = storage
        for storage in storages.values():
            size, pinned = storage.nbytes(), device_type == "cuda"
            waiting = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            waiting.copy_(_bytes_of(storage))
            storage.resize_(0)
            self._held.append((storage, waiting))
        if device_type == "cuda" and torch.cuda.is_available():
            # Other processes see what the allocator lets go of, not what it keeps for itself.
            torch.cuda.empty_cache()
        return sum(waiting.numel() for _, waiting in self._held)

    def take(self) -> None:
        """Take the memory again, and the bytes with it; nothing if none was given."""
        while self._held:
            storage, waiting = self._held.pop()
            storage.resize_(waiting.numel())
            _bytes_of(storage).copy_(waiting)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def reset_peak() -> None:
    """Start a new measurement: the peak falls to what is used now, and what is kept for reuse."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    reset_peaks([os.getpid()])


def peak_bytes() -> dict[str, float]:
    """`peak_rss_bytes` of this process since the reset, and `peak_cuda_bytes` with a GPU."""
    peaks = {"peak_rss_bytes": float(resident_peak_bytes([os.getpid()]))}
    if torch.cuda.is_available():
        peaks["peak_cuda_bytes"] = float(torch.cuda.max_memory_allocated())
    return peaks
