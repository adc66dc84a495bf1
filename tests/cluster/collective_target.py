"""A target whose ranks are connected by torch.distributed, and block in its collectives."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from earl_core.cluster.rank_process import WorkerContext
from earl_core.learner.parallel.mesh import join_world


class Collective:
    """Connects to the other ranks with gloo when it is built."""

    def __init__(
        self, context: WorkerContext, deployment: dict[str, Any], closed: str | None = None
    ) -> None:
        self._context = context
        self._closed = closed
        torch.set_num_threads(1)
        join_world("gloo", timedelta(minutes=30))

    def total(self, value: int) -> list[int]:
        """The sum of value + rank over all ranks, and the port that they met at."""
        tensor = torch.tensor(value + self._context.rank)
        dist.all_reduce(tensor)
        return [int(tensor), int(os.environ["MASTER_PORT"])]

    def block(self) -> None:
        """Every rank waits for ever: rank 1 for a message, the others for rank 1."""
        self._context.report({"blocked": True})
        tensor = torch.zeros(8)
        if self._context.rank == 1:
            dist.recv(tensor, src=2)
        else:
            dist.all_reduce(tensor)

    def starve(self, rank: int, cgroup: str, megabytes: int) -> None:
        """One rank outgrows its memory while the others wait for it."""
        if self._context.rank == rank:
            Path(cgroup, "cgroup.procs").write_text(str(os.getpid()))
            block = bytearray(megabytes << 20)
            for position in range(0, len(block), 4096):
                block[position] = 1
        dist.all_reduce(torch.zeros(8))

    def close(self) -> None:
        dist.destroy_process_group()
        if self._closed is not None:
            Path(self._closed, str(self._context.rank)).touch()
