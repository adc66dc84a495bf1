"""Memory of the learner: its peak, and one typed error for running out of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch

from earl_core.selector.model.sizes import BYTES_PER_LOGIT, positions_at_a_time
from earl_core.system import fault_points, memory
from earl_core.system.memory import (
    give_back_free_memory,
    memory_in_use,
    memory_limit,
    reset_peaks,
    resident_peak_bytes,
)
from earl_core.tensors.device_copies import host_memory, queued

_Result = TypeVar("_Result")

_ADVICE = (
    "lower update.max_tokens_per_microbatch, set update.activation_checkpointing to selective or "
    "full, or give the stage more ranks"
)


@contextmanager
def microbatch(stage: str, iteration: int, number: int, count: int, tokens: int) -> Iterator[None]:
    """Enclose the work on one microbatch, numbered from 1: raises `OutOfMemory` in place of the
    errors that the allocators of Python, of torch on the CPU and of CUDA raise. Its payload holds
    microbatch, microbatches and tokens too. Has the fault point `<stage>.microbatch<number>`."""
    doing = f"microbatch {number} of {count} of '{stage}', {tokens:,} tokens,"
    numbers = {"microbatch": number, "microbatches": count, "tokens": tokens}
    with memory.guarded(stage, doing, _ADVICE, **numbers):
        fault_points.point(f"{stage}.microbatch{number}", iteration)
        yield


@contextmanager
def guarded(stage: str) -> Iterator[None]:
    """Enclose all that a rank does for a stage: `OutOfMemory` names this stage, whichever part of
    the work was refused memory. Also a decorator of plain functions. Afterwards free memory goes
    back to the host where it is scarce, because other stages may need it."""
    try:
        with memory.guarded(stage, f"'{stage}', outside of its microbatches,", _ADVICE):
            yield
    finally:
        _give_back_what_is_scarce()


def guarded_stage(work: Callable[..., _Result]) -> Callable[..., _Result]:
    """Decorate a method of a worker: `guarded` for the worker's own `stage`."""

    @wraps(work)
    def guarded_work(worker: Any, *arguments: Any, **named: Any) -> _Result:
        with guarded(worker.stage):
            return work(worker, *arguments, **named)

    return guarded_work


def _give_back_what_is_scarce() -> None:
    if memory_in_use() > memory_limit() / 2:
        give_back_free_memory()


_PARKED_BYTES = 2**28
"""Bytes of a block of host memory: a power of two, to which torch rounds page-locked memory up."""


class Parking:
    """Device memory of tensors, given back and taken again; their bytes wait in host memory.

    The tensors stay the objects they are, so that all who hold views of them hold them still; in
    between they must not be used. Copies are queued piece by piece, and the host memory is kept for
    the next time: page-locking it takes longer than a copy.

    device_type: of the tensors that are meant.
    """

    def __init__(self, device_type: str = "cuda") -> None:
        self._device_type = device_type
        self._held: list[torch.UntypedStorage] = []
        self._sizes: list[int] = []
        self._memories: list[torch.Tensor] = []

    @property
    def kept_bytes(self) -> int:
        """Host memory that is held, with bytes in it or for the next time."""
        return sum(memory.numel() for memory in self._memories)

    def give(self, tensors: Iterable[torch.Tensor]) -> int:
        """Give the memory of those on such devices back; returns its bytes, earlier ones too."""
        storages = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.device.type == self._device_type and storage.nbytes():
                storages[storage.data_ptr()] = storage
        self._held += storages.values()
        first = len(self._sizes)
        self._sizes += [storage.nbytes() for storage in storages.values()]
        try:
            for storage, pieces in self._pieces(first):
                there = _bytes_of(storage)
                for inside, here in pieces:
                    here.copy_(there[inside], non_blocking=True)
            # The memory may go to another stream, which does not know of the copies.
            self._wait()
        except BaseException:  # such as no host memory: these are where they were
            del self._held[first:], self._sizes[first:]
            raise
        for storage in storages.values():
            storage.resize_(0)
        if self._device_type == "cuda" and storages:
            # Other processes see what the allocator lets go of, not what it keeps for itself.
            torch.cuda.empty_cache()
        return sum(self._sizes)

    def take(self) -> None:
        """Take the memory again, and the bytes with it; nothing if none was given. Host memory that
        this hand-over did not need goes."""
        if not self._held:
            return
        for storage, pieces in self._pieces(0):
            storage.resize_(sum(here.numel() for _, here in pieces))
            there = _bytes_of(storage)
            for inside, here in pieces:
                there[inside].copy_(here, non_blocking=True)
        self._wait()
        self._memories[-(-sum(self._sizes) // _PARKED_BYTES) :] = []
        self._held.clear()
        self._sizes.clear()

    def _pieces(
        self, first: int
    ) -> Iterator[tuple[torch.UntypedStorage, list[tuple[slice, torch.Tensor]]]]:
        """Yield the storages from that one on, each with ranges of its bytes and the host memory in
        which each range waits."""
        place = sum(self._sizes[:first])
        for storage, size in zip(self._held[first:], self._sizes[first:], strict=True):
            pieces, done = [], 0
            while done < size:
                number, start = divmod(place + done, _PARKED_BYTES)
                if number == len(self._memories):
                    self._memories.append(host_memory(_PARKED_BYTES, storage.device))
                count = min(size - done, _PARKED_BYTES - start)
                here = self._memories[number][start : start + count]
                pieces.append((slice(done, done + count), here))
                done += count
            place += size
            yield storage, pieces

    def _wait(self) -> None:
        for device in {storage.device for storage in self._held}:
            queued(device)()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def reset_peak() -> None:
    """Start a new measurement: the peak falls to what is used now, and what is kept for reuse."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    reset_peaks([os.getpid()])


def peak_bytes() -> dict[str, float]:
    """`peak_rss_bytes` of this process since the reset. With a GPU `peak_cuda_bytes`, the most that
    torch's allocator took, and `other_cuda_bytes`, what is taken beside it now: by libraries, by
    communication, and by other processes, asleep or not."""
    peaks = {"peak_rss_bytes": float(resident_peak_bytes([os.getpid()]))}
    if torch.cuda.is_available():
        peaks["peak_cuda_bytes"] = float(torch.cuda.max_memory_reserved())
        free, total = torch.cuda.mem_get_info()
        peaks["other_cuda_bytes"] = float(max(0, total - free - torch.cuda.memory_reserved()))
    return peaks


# Positions of a chunk of logits on a GPU that is short of memory, at least.
_FEWEST_POSITIONS = 128


def positions_that_fit(width: int, device: torch.device) -> int:
    """Positions of a chunk of logits by default; halved until a GPU's free memory holds two such
    chunks."""
    gpu = device.type == "cuda"
    most = positions_at_a_time(width, gpu=gpu)
    if gpu and torch.cuda.is_available() and not torch.are_deterministic_algorithms_enabled():
        reserved, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + reserved - used
        while most > _FEWEST_POSITIONS and 2 * most * width * BYTES_PER_LOGIT > free:
            most //= 2
    return most
