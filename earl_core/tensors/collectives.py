"""Ranks that do one thing together: a failure of one is the error of all, so that none waits.

Ranks exchange arrays of numbers and JSON in the host's memory, never pickles; no device waits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from earl_core.tensors.errors import CheckpointError, WeightsError

_T = TypeVar("_T")

GroupName = Literal[
    "replicas",
    "shard",
    "context_parallel",
    "tensor_parallel",
    "data_parallel",
    "parameters",
    "replica",
    "world",
]


class Mesh(Protocol):
    """A device mesh, as far as collectives ask. hosts: of each rank; none: all are on one."""

    hosts: Sequence[str]

    def group(self, name: GroupName) -> dist.ProcessGroup | None:
        """The process group of that name; None where this rank is alone in it."""


class Ranks:
    """The ranks of a mesh, or those of one of its groups, this one included; without a mesh, one
    process that talks to nobody.

    All methods but `first`'s, `send` and `receive` are collective: every rank calls them in the
    same order. hosts: of each rank of the whole world; equal texts where nobody knows.
    """

    def __init__(self, mesh: Mesh | None = None, group: GroupName = "world") -> None:
        self._group = None if mesh is None else mesh.group(group)
        self.rank = 0 if self._group is None else self._group.rank()
        self.size = 1 if self._group is None else self._group.size()
        known = () if mesh is None or group != "world" else mesh.hosts
        self.hosts: Sequence[str] = known or ("",) * self.size

    @property
    def first(self) -> bool:
        """True on the rank that makes and names the files."""
        return self.rank == 0

    def do(self, action: Callable[[], _T]) -> _T:
        """Run the action on each rank; when it fails on one, every rank raises that error. Also a
        barrier: what the others did in it is done when it returns."""
        error: Exception | None = None
        result: _T | None = None
        try:
            result = action()
        except Exception as caught:
            error = caught
        self._agree(error)
        return result  # type: ignore[return-value]

    def on_first(self, action: Callable[[], None]) -> None:
        """Run the action on rank 0 only; its error is everyone's."""
        self.do(action if self.first else lambda: None)

    def from_first(self, action: Callable[[], Any]) -> Any:
        """Run the action on rank 0 and return its result on all ranks; it must be JSON."""
        return self.gather_json(self.do(action if self.first else lambda: None))[0]

    def gather(self, table: torch.Tensor) -> list[torch.Tensor]:
        """The tables of all ranks, by rank; all have one shape and one dtype."""
        if self._group is None:
            return [table]
        tables = [torch.empty_like(table) for _ in range(self.size)]
        dist.all_gather(tables, table.contiguous(), group=self._group)
        return tables

    def gather_rows(self, rows: np.ndarray) -> list[np.ndarray]:
        """The arrays [n_r, ...] of all ranks, by rank; equal dtypes and other dimensions."""
        if self._group is None:
            return [rows]
        lengths = [int(n) for n in self.gather(torch.tensor([len(rows)], dtype=torch.int64))]
        padded = np.zeros((max(lengths), *rows.shape[1:]), dtype=rows.dtype)
        padded[: len(rows)] = rows
        # As bytes, because torch knows fewer dtypes.
        parts = self.gather(torch.from_numpy(padded.reshape(-1).view(np.uint8)))
        arrays = [part.numpy().view(rows.dtype).reshape(padded.shape) for part in parts]
        return [array[:n] for array, n in zip(arrays, lengths, strict=True)]

    def gather_json(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank; they must be JSON."""
        if self._group is None:
            return [value]
        text = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
        return [json.loads(part.tobytes()) for part in self.gather_rows(text)]

    def send(self, tensor: torch.Tensor, to: int) -> dist.Work:
        """Begin to send a contiguous tensor to a rank that receives it, in the order of the calls;
        of this method's callers alone. It must stay until the work is waited for."""
        flat = tensor.view(-1).view(torch.uint8)
        return _begun(dist.isend(flat, group=self._group, group_dst=to))

    def receive(self, into: torch.Tensor, source: int) -> dist.Work:
        """Begin to receive what that rank sends; as many bytes as `into` has."""
        flat = into.view(-1).view(torch.uint8)
        return _begun(dist.irecv(flat, group=self._group, group_src=source))

    def most(self, counts: Sequence[int]) -> list[int]:
        """The largest count over the ranks at each place; equally many on all."""
        every = self.gather(torch.tensor(list(counts), dtype=torch.int64))
        return [max(each) for each in zip(*(table.tolist() for table in every), strict=True)]

    def _agree(self, error: Exception | None) -> None:
        every = self.gather_json(None if error is None else _described(error))
        if error is not None:
            raise error
        for rank, described in enumerate(every):
            if described is not None:
                raise _rebuilt(described, rank)


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "both ranks are of the group"
    return work


_KNOWN = {kind.__name__: kind for kind in (CheckpointError, WeightsError)}


def _described(error: Exception) -> dict[str, Any]:
    number = error.errno if isinstance(error, OSError) else None
    message = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return {"kind": type(error).__name__, "errno": number, "message": message}


def _rebuilt(described: dict[str, Any], rank: int) -> Exception:
    message = f"rank {rank}: {described['message']}"
    if described["errno"] is not None:
        return OSError(described["errno"], message)
    known = _KNOWN.get(described["kind"])
    if known is not None:
        return known(message)
    return RuntimeError(f"rank {rank} failed with {described['kind']}: {described['message']}")
