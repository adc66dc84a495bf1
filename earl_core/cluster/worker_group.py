"""The interface of a worker group; backends implement it and share one contract test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

Json = dict[str, Any]
Progress = Callable[[Json], None]


@dataclass(frozen=True)
class MemoryUse:
    """Memory of one rank and its children, in bytes, as of its last heartbeat or result.

    `rss_bytes` is the rank's own resident memory, mapped shards included. `tree_bytes` adds up the
    private memory (neither file nor shared memory) of the rank and all its children, and
    `tree_peak_bytes` is the most seen of that since the current or last call began, sampled four
    times a second.
    """

    rss_bytes: int = 0
    tree_bytes: int = 0
    tree_peak_bytes: int = 0


@runtime_checkable
class WorkerGroup(Protocol):
    """`world_size` ranks that hold one target object each and answer calls to its methods.

    The target is a class named `"package.module:Class"`. Each rank builds
    `Class(context, deployment, **arguments)` and keeps it until `stop()`. A group runs one call at
    a time; a second caller waits for the first. A `WorkerLost` ends the group: `alive` is
    False, and `start()` makes a fresh one. After `WorkerCallFailed` of a call the group stays
    usable if every rank has answered.
    """

    role: str

    def start(self, deployment: Json, arguments: Json, world_size: int = 1) -> None:
        """End what runs, start the ranks and return once every target is built."""

    def call(
        self,
        method: str,
        *,
        stage: str,
        iteration: int,
        deadline_seconds: float,
        on_progress: Progress | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """Run `method(**arguments)` in every rank; return its JSON results in rank order."""

    async def acall(
        self,
        method: str,
        *,
        stage: str,
        iteration: int,
        deadline_seconds: float,
        on_progress: Progress | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """`call` for asyncio. Once a cancelled `acall` has raised, the group is idle or ended."""

    def reshard(
        self, deployment: Json, *, stage: str, iteration: int, deadline_seconds: float
    ) -> list[Any]:
        """Call `reshard(deployment=...)` in every rank; `deployment` is then the group's.

        The ranks stay and keep their state, so `world_size` cannot change this way. The results in
        rank order. After `WorkerCallFailed` the group has ended.
        """

    def stop(self, grace_seconds: float = 10.0) -> None:
        """Close the targets and end all processes of the group; harmless when nothing runs."""

    @property
    def deployment(self) -> Json | None:
        """The dumped StageDeployment that the ranks follow, or None when it is not alive."""

    @property
    def alive(self) -> bool:
        """Whether every rank is up and the group can take a call."""

    @property
    def pids(self) -> list[int]:
        """The ranks' process ids in rank order; empty when the group is not alive."""

    @property
    def memory(self) -> list[MemoryUse]:
        """What each rank used, in rank order; empty before the first start."""
