"""Flow runs of deployments that work on the same run, one after the other.

Nobody sits at a terminal where a deployment's flow run begins, so it waits while another live
process has its run. It stays of the type Running in the meantime, under a name of its own: its
process lives, a cancellation reaches it, and it keeps the slot of its deployment.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from prefect.client.schemas.objects import StateDetails, StateType
from prefect.context import FlowRunContext
from prefect.logging import get_run_logger
from prefect.states import Running

from earl_core.run.lock import in_use, is_locked

WAITING = "Waiting for run"
"""The name of the state."""

_EVERY_SECONDS = 2.0


def waits() -> bool:
    """Tell whether the flow run at hand waits for its run, rather than fail at once."""
    context = FlowRunContext.get()
    flow_run = context.flow_run if context is not None else None
    return flow_run is not None and flow_run.deployment_id is not None


async def wait_for(run: Path, seconds: float) -> None:
    """Return once no other process has the run, at once for flow runs that do not wait. seconds:
    how long to wait at most. Raises `InUse` when they are over."""
    if not waits() or not is_locked(run):
        return
    busy = in_use(run)
    await _show(WAITING, f"{run} is in use by {busy.holder}; this flow run goes on after it.")
    get_run_logger().info("%s is in use by %s: waiting until it is free", run, busy.holder)
    deadline = time.monotonic() + seconds
    while is_locked(run):
        if time.monotonic() > deadline:
            raise in_use(run)
        await asyncio.sleep(_EVERY_SECONDS)
    await _show("Running", None)


async def _show(name: str, message: str | None) -> None:
    """Rename the state at the server, unless that was told to end the flow run meanwhile."""
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None
    # Its methods are typed as those of the clients with and without `await` at once.
    client: Any = context.client
    identity = context.flow_run.id
    # A server that does not answer now shows another name for a while; the flow goes on.
    with suppress(httpx.HTTPError):
        known = (await client.read_flow_run(identity)).state
        if known is None or known.type is not StateType.RUNNING:
            return
        # The lease holds the deployment's slot; the server looks for it in the last state.
        lease = known.state_details.deployment_concurrency_lease_id
        details = StateDetails(deployment_concurrency_lease_id=lease)
        await client.set_flow_run_state(
            identity, Running(name=name, message=message, state_details=details)
        )
