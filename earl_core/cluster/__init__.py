"""Worker groups: the processes that do a stage's heavy work, behind one interface.

`WorkerGroup` is the interface, `LocalWorkerGroup` the backend for processes on this host. Names are
resolved on first use, because every supervisor and every rank imports this package when it starts
and needs only a few of its modules.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from earl_core.cluster.context import WorkerContext
    from earl_core.cluster.errors import (
        WorkerCallFailed,
        WorkerError,
        WorkerLost,
    )
    from earl_core.cluster.local import LocalWorkerGroup
    from earl_core.cluster.worker_group import MemoryUse, WorkerGroup

_HOMES = {
    "WorkerLost": "errors",
    "LocalWorkerGroup": "local",
    "MemoryUse": "worker_group",
    "WorkerCallFailed": "errors",
    "WorkerContext": "context",
    "WorkerError": "errors",
    "WorkerGroup": "worker_group",
}

__all__ = [
    "LocalWorkerGroup",
    "MemoryUse",
    "WorkerCallFailed",
    "WorkerContext",
    "WorkerError",
    "WorkerGroup",
    "WorkerLost",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
