"""How the ranks of a local group find each other: the variables that torch.distributed reads."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from earl_core.cluster.errors import WorkerCallFailed, WorkerError

ATTEMPTS = 3
"""How often a group is started when another process takes its port before rank 0 does."""


def shared_variables(world_size: int, given: Mapping[str, str]) -> dict[str, str]:
    """`given`, and what all ranks of one start have in common: how many, and a port now free."""
    # The host's own name may resolve to an address that nothing can be reached at.
    return {
        "GLOO_SOCKET_IFNAME": "lo",
        **given,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }


def rank_variables(rank: int) -> dict[str, str]:
    """What one rank has for itself."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def port_was_taken(error: WorkerError) -> bool:
    """Whether a start failed because the port was free when chosen and then was not."""
    return isinstance(error, WorkerCallFailed) and "EADDRINUSE" in error.message


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
