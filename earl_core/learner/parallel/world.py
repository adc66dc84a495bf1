"""Connecting a rank with the others, where nobody else can connect."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from earl_core.cluster.host import take_listener


def join_world(backend: str, timeout: timedelta) -> None:
    """Connect this process with the other ranks through torch.distributed.

    Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Rank 0 listens there alone, not on every
    interface, as torch.distributed left to itself does. Raises `OSError` when it cannot and
    `torch.distributed.DistError` when the others do not come in time.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        size,
        is_master=rank == 0,
        timeout=timeout,
        master_listen_fd=take_listener() if rank == 0 else None,
    )
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
