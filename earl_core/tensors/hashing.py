"""Digests of tensors: each one's bytes hashed by a thread, while others are still being written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import xxhash

from earl_core.pretrained.weight_digest import combined
from earl_core.tensors.device_copies import bytes_on_host, on_host
from earl_core.tensors.safetensors_layout import DTYPE_CODES

_MOST_THREADS = 8  # more read memory no faster


class TensorHashes:
    """xxh3_128 of tensors, computed by half as many threads as torch computes with.

    Where that is no more than one, what is on the host is hashed at once: threads would only take
    turns. At the end of the context no tensor is read any more.
    """

    def __init__(self) -> None:
        count = min(_MOST_THREADS, torch.get_num_threads() // 2)
        self._at_once = count <= 1
        self._threads = ThreadPoolExecutor(max(1, count), thread_name_prefix="hash")
        self._found: dict[str, Future[str]] = {}

    def start(
        self, name: str, tensor: torch.Tensor, ready: Callable[[], None] | None = None
    ) -> None:
        """Hash the tensor as soon as `ready` has returned."""
        if self._at_once and ready is None and on_host(tensor):
            done = self._found[name] = Future()
            done.set_result(tensor_hash(tensor))
            return

        def hashed() -> str:
            if ready is not None:
                ready()
            return tensor_hash(tensor)

        self._found[name] = self._threads.submit(hashed)

    def __contains__(self, name: str) -> bool:
        """True when the hash of this tensor was started."""
        return name in self._found

    def results(self) -> dict[str, str]:
        """The hash of each tensor, in hex, once all are there."""
        return {name: each.result() for name, each in self._found.items()}

    def __enter__(self) -> TensorHashes:
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(cancel_futures=True)


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """xxh3_128 over names, dtypes, shapes and each tensor's own xxh3_128, in the order of names. 32
    hex digits. Tensors are whole; see `digest_together` for many ranks."""
    with TensorHashes() as hashes:
        for name, tensor in tensors.items():
            hashes.start(name, tensor)
        found = hashes.results()
    return combine(
        {name: (each.dtype, tuple(each.shape), found[name]) for name, each in tensors.items()}
    )


def tensor_hash(tensor: torch.Tensor) -> str:
    """xxh3_128 over a tensor's bytes, in hex."""
    state = xxhash.xxh3_128()
    if not tensor.numel():
        return state.hexdigest()
    if on_host(tensor):
        state.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    else:
        for piece in bytes_on_host(tensor):
            state.update(piece.numpy().data)
    return state.hexdigest()


def combine(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...], str]]) -> str:
    """xxh3_128 over names, dtypes, shapes and hashes of tensors, by name; 32 hex digits."""
    return combined({name: (DTYPE_CODES[each[0]], *each[1:]) for name, each in tensors.items()})
