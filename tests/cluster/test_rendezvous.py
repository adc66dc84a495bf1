"""Ranks meet at a port of this host, also when another process was faster to take it."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from earl_core.cluster import WorkerCallFailed, WorkerContext
from tests.cluster.conftest import MakeGroup

TARGET = "tests.cluster.test_rendezvous:Meeting"
SITE: dict[str, Any] = {"stage": "update", "iteration": 0, "deadline_seconds": 20}


class Meeting:
    """Rank 0 listens where torch.distributed would, and fails in the same words."""

    def __init__(self, context: WorkerContext, deployment: dict[str, Any], starts: str) -> None:
        Path(starts, f"{os.getpid()}").touch()
        self._socket = socket.socket()
        if context.rank == 0:
            try:
                self._socket.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
            except OSError as error:
                raise RuntimeError(f"failed to listen, name: EADDRINUSE, {error}") from error

    def port(self) -> int:
        return int(os.environ["MASTER_PORT"])


@pytest.fixture
def taken() -> Any:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield int(sock.getsockname()[1])


def test_a_port_that_was_taken_meanwhile_is_replaced(
    taken: int, make_local: MakeGroup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from earl_core.cluster import rendezvous

    free = rendezvous._free_port
    offered = [taken, taken]
    monkeypatch.setattr(rendezvous, "_free_port", lambda: offered.pop() if offered else free())
    group = make_local(target=TARGET)
    group.start({}, {"starts": str(tmp_path)}, world_size=2)
    first, second = group.call("port", **SITE)
    assert first == second != taken
    assert len([path for path in tmp_path.iterdir() if path.name.isdigit()]) == 6


def test_a_port_that_stays_taken_is_an_error(
    taken: int, make_local: MakeGroup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("earl_core.cluster.rendezvous._free_port", lambda: taken)
    group = make_local(target=TARGET)
    with pytest.raises(WorkerCallFailed, match="EADDRINUSE"):
        group.start({}, {"starts": str(tmp_path)}, world_size=2)
    assert not group.alive
