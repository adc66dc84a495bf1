"""Backends of worker groups, and groups that are stopped at the end of a test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from earl_core.cluster import LocalWorkerGroup
from earl_core.system.process_tree import inspect

TARGET = "tests.cluster.targets:Target"
MakeGroup = Callable[..., Any]

# A later backend joins the contract test by adding its constructor here.
BACKENDS: dict[str, Callable[..., Any]] = {"local": LocalWorkerGroup}


def gone_within(pids: list[int], seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while any(inspect(pid) is not None for pid in pids):
        if time.monotonic() > limit:
            return False
        time.sleep(0.02)
    return True


def _maker(constructor: Callable[..., Any], path: Path, made: list[Any]) -> MakeGroup:
    def make(role: str = "w", target: str = TARGET, **settings: Any) -> Any:
        settings.setdefault("heartbeat_seconds", 0.2)
        settings.setdefault("start_timeout_seconds", 20)
        group = constructor(role, target, log_directory=path / "logs", **settings)
        made.append(group)
        return group

    return make


@pytest.fixture(params=sorted(BACKENDS))
def make_group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeGroup]:
    made: list[Any] = []
    yield _maker(BACKENDS[request.param], tmp_path, made)
    for group in made:
        group.stop(grace_seconds=1)


@pytest.fixture
def make_local(tmp_path: Path) -> Iterator[MakeGroup]:
    made: list[Any] = []
    yield _maker(LocalWorkerGroup, tmp_path, made)
    for group in made:
        group.stop(grace_seconds=1)


@pytest.fixture
def site() -> dict[str, Any]:
    """The arguments that every call needs."""
    return {"stage": "rollout", "iteration": 7, "deadline_seconds": 20}
