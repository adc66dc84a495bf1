"""Ranks meet at a port of this host that nobody else can take, and listen nowhere else."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

from earl_core.cluster.rank_process import WorkerContext
from tests.cluster.conftest import HERE, MakeGroup
from tests.listeners import listeners

SITE: dict[str, Any] = {"stage": "update", "iteration": 0, "deadline_seconds": 300}


class Thief:
    """A process that wants the port before rank 0 listens on it."""

    def __init__(self, context: WorkerContext, deployment: dict[str, Any]) -> None:
        pass

    def steal(self) -> list[int]:
        """What taking the port on every interface, and on loopback, ends with."""
        return [_bind(address) for address in ("0.0.0.0", "127.0.0.1")]


def _bind(address: str) -> int:
    with socket.socket() as taking:
        try:
            taking.bind((address, int(os.environ["MASTER_PORT"])))
        except OSError as error:
            return error.errno or -1
    return 0


@HERE
def test_nobody_takes_the_port_before_the_ranks_do(make_group: MakeGroup) -> None:
    group = make_group(target=f"{__name__}:Thief")
    group.start({}, {}, world_size=2)
    assert group.call("steal", **SITE) == [[errno.EADDRINUSE] * 2] * 2


@HERE
def test_connected_ranks_listen_on_loopback_only(make_group: MakeGroup) -> None:
    group = make_group(target="tests.cluster.collective_target:Collective")
    group.start({}, {}, world_size=2)
    (_, port), _ = group.call("total", value=1, **SITE)
    found = listeners(group.pids)
    assert port in {listener.port for listener in found}
    assert [listener for listener in found if not listener.on_loopback] == []
