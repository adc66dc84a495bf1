"""The interface of a worker group."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

from earl_core.cluster.host import Host, MemoryUse
from earl_core.cluster.rpc import Json, Progress


class Group(Protocol):
    """The ranks of one role. See `WorkerGroup`, whose members these are; `InProcessGroup` is
    the one for a debugger."""

    role: str

    @property
    def alive(self) -> bool: ...

    @property
    def deployment(self) -> Json | None: ...

    @property
    def silent_loss(self) -> str: ...

    @property
    def memory(self) -> list[MemoryUse]: ...

    def start(
        self,
        deployment: Json,
        arguments: Json,
        world_size: int = 1,
        hosts: Sequence[Host] | None = None,
    ) -> None: ...

    def stop(self, grace_seconds: float = 10.0) -> None: ...

    def call(
        self,
        method: str,
        *,
        stage: str,
        iteration: int,
        deadline_seconds: float,
        on_progress: Progress | None = None,
        abort: threading.Event | None = None,
        **arguments: Any,
    ) -> list[Any]: ...

    def reshard(
        self, deployment: Json, *, stage: str, iteration: int, deadline_seconds: float
    ) -> list[Any]: ...
