"""Groups that are stopped at the end of a test, on this machine and on a host of a Ray cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from earl_core.cluster.host import Host, LocalHost
from earl_core.cluster.worker_group import WorkerGroup
from earl_core.system.processes import inspect
from tests.shared import free_port

TARGET = "tests.cluster.targets:Target"
MakeGroup = Callable[..., Any]

HERE = pytest.mark.parametrize("host", ["here"], indirect=True)
"""For a test that looks into the controller's own processes."""

_START_SECONDS = 120.0


@pytest.fixture(params=["here", pytest.param("ray", marks=pytest.mark.slow)])
def host(request: pytest.FixtureRequest) -> Host:
    """Where the ranks of a test's groups run."""
    if request.param == "here":
        return LocalHost()
    found: Host = request.getfixturevalue("ray_host")
    return found


@pytest.fixture(scope="package")
def ray_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """This machine as the one host of a Ray cluster of its own."""
    pytest.importorskip("ray")
    from earl_core.cluster.ray_cluster import RayCluster

    log = tmp_path_factory.mktemp("ray") / "raylet.log"
    address = f"127.0.0.1:{free_port()}"
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block"]
    command += [f"--port={address.split(':')[1]}", "--node-ip-address=127.0.0.1", "--num-cpus=2"]
    command += ["--object-store-memory=100000000", "--include-dashboard=false"]
    command += ["--disable-usage-stats"]
    with log.open("wb") as output:
        raylet = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + _START_SECONDS
        while "Ray runtime started" not in log.read_text():
            assert raylet.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        directory = str(log.parent)
        # Ray listens at the machine's own address, too.
        cluster = RayCluster(address, range(1, 2), 2, 0, directory, insecure=True)
        yield cluster.hosts()[0]
        cluster.close()
    finally:
        raylet.terminate()
        raylet.wait()


class HostedGroup(WorkerGroup):
    """All ranks on one host."""

    host: Host

    def start(
        self,
        deployment: dict[str, Any],
        arguments: dict[str, Any],
        world_size: int = 1,
        hosts: Sequence[Host] | None = None,
    ) -> None:
        super().start(deployment, arguments, world_size, hosts or [self.host] * world_size)


def gone_within(pids: list[int], seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while any(inspect(pid) is not None for pid in pids):
        if time.monotonic() > limit:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def make_group(tmp_path: Path, host: Host) -> Iterator[MakeGroup]:
    made: list[WorkerGroup] = []

    def make(role: str = "w", target: str = TARGET, **settings: Any) -> WorkerGroup:
        settings.setdefault("heartbeat_seconds", 0.2)
        settings.setdefault("start_timeout_seconds", 120)
        group = HostedGroup(role, target, log_directory=tmp_path / "logs", **settings)
        group.host = host
        made.append(group)
        return group

    yield make
    for group in made:
        group.stop(grace_seconds=1)


@pytest.fixture
def site() -> dict[str, Any]:
    """The arguments that every call needs."""
    return {"stage": "rollout", "iteration": 7, "deadline_seconds": 120}
