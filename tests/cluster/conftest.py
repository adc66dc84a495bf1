"""Backends of worker groups, and groups that are stopped at the end of a test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from earl_core.cluster.worker_group import WorkerGroup
from earl_core.system.processes import inspect

TARGET = "tests.cluster.targets:Target"
MakeGroup = Callable[..., Any]


def gone_within(pids: list[int], seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while any(inspect(pid) is not None for pid in pids):
        if time.monotonic() > limit:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def make_group(tmp_path: Path) -> Iterator[MakeGroup]:
    made: list[WorkerGroup] = []

    def make(role: str = "w", target: str = TARGET, **settings: Any) -> WorkerGroup:
        settings.setdefault("heartbeat_seconds", 0.2)
        settings.setdefault("start_timeout_seconds", 20)
        group = WorkerGroup(role, target, log_directory=tmp_path / "logs", **settings)
        made.append(group)
        return group

    yield make
    for group in made:
        group.stop(grace_seconds=1)


@pytest.fixture
def site() -> dict[str, Any]:
    """The arguments that every call needs."""
    return {"stage": "rollout", "iteration": 7, "deadline_seconds": 20}
