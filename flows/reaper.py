"""Prefect flow runs whose process is gone are forced to CRASHED, so that they free their slot.

With the worker alive Prefect notices a killed flow process itself. With both gone the run would
stay RUNNING for ever and hold its concurrency slot. Each flow run of ours leaves a note with the
id of its process; whoever starts next looks at the notes.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed

from earl_core.process import ProcessId

logger = logging.getLogger(__name__)


def _notes(runs_directory: str | Path) -> Path:
    return Path(runs_directory) / ".flow_runs"


@contextmanager
def register_flow_run(runs_directory: str | Path) -> Iterator[None]:
    """Leave a note about the current flow run while it runs."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        yield
        return
    note = _notes(runs_directory) / f"{context.flow_run.id}.json"
    note.parent.mkdir(parents=True, exist_ok=True)
    owner = {"host": socket.gethostname(), "process": str(ProcessId.current())}
    note.write_text(json.dumps(owner))
    try:
        yield
    finally:
        note.unlink(missing_ok=True)


async def reap(runs_directory: str | Path) -> list[str]:
    """Force this host's flow runs without a process to CRASHED; returns their ids."""
    reaped = []
    for note in sorted(_notes(runs_directory).glob("*.json")):
        try:
            owner = json.loads(note.read_text())
            process = ProcessId.parse(owner["process"])
        except (OSError, ValueError, KeyError):
            continue
        if owner.get("host") != socket.gethostname() or process is None or process.alive():
            continue
        reaped.extend(await _crash(UUID(note.stem)))
        note.unlink(missing_ok=True)
    return reaped


async def _crash(flow_run_id: UUID) -> list[str]:
    message = "Its process is gone; found at the start of another run."
    reaped = []
    async with get_client() as client:
        try:
            known = await client.read_flow_run(flow_run_id)
        except ObjectNotFound:
            return []
        children = await _children(client, flow_run_id)
        for flow_run in [known, *children]:
            if flow_run.state is not None and not flow_run.state.is_final():
                await client.set_flow_run_state(flow_run.id, Crashed(message=message), force=True)
                reaped.append(str(flow_run.id))
    return reaped


async def _children(client, parent: UUID):  # type: ignore[no-untyped-def]
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterParentFlowRunId,
    )

    only = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[parent]))
    return await client.read_flow_runs(flow_run_filter=only)
