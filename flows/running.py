"""The part that every flow does around its work: notes for the server's sake, and an open run."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import httpx
from prefect import Flow, State, tags
from prefect.client import orchestration
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_SSL_CERT_FILE, PREFECT_API_URL
from prefect.states import Cancelled

from earl_core.config import ConfigError, RunConfig, load_config
from earl_core.control.live import interrupt_all
from earl_core.control.run_controller import (
    HostsChanged,
    RunController,
    close_controller,
    find_controller,
    open_controller,
)
from earl_core.models.progress import ticking
from earl_core.run.lock import is_locked
from earl_core.run.record import stored_config
from earl_core.secrets import guard_logging, redact_error
from earl_core.system.errors import InUse
from flows import flow_ledger
from flows.failure import failed, log_sentences
from flows.flow_ledger import Note
from flows.forms import try_to_renew_runs
from flows.progress import Pace, preparation
from flows.reaper import keep_reconciled
from flows.run_queue import wait_for, waits
from flows.server_access import Access
from tasks.reports.lines import evaluation_text, iteration_text
from tasks.result_security import distrust_servers
from tasks.tracking.mlflow_client import check_tracker
from tasks.tracking.tracker import Tracker


def _share_tls_context() -> None:
    """Make a TLS context once for each file of certificates from now on; before the first flow.

    Prefect makes two clients for each task run and one for each artifact, and has each read the
    root certificates: 0.06 s of every stage (Prefect 3.7), also where the server speaks plain HTTP.
    """
    if isinstance(orchestration.ssl, SimpleNamespace):
        return
    shared = SimpleNamespace(**vars(ssl))
    shared.create_default_context = cache(ssl.create_default_context)
    orchestration.ssl = shared  # type: ignore[assignment]


distrust_servers()
_share_tls_context()

T = TypeVar("T")

_listener: Callable[[str, int, dict[str, Any]], None] | None = None
_noted: dict[str, tuple[str, Note]] = {}
"""Flow runs of this process that go on: their runs directory and note."""

_pace = Pace()
_loggers: list[Any] = []
"""Loggers of the flow runs of this process that go on."""

_stopped: list[str] = []
"""The outcome of what this process was told to stop, once it was."""


def set_listener(listener: Callable[[str, int, dict[str, Any]], None] | None) -> None:
    """Have the flows of this process report their progress, for a display."""
    global _listener
    _listener = listener


def heard(stage: str, iteration: int, event: dict[str, Any]) -> None:
    """Report an event of work that goes on: to the Prefect run's log, and to the display."""
    _pace.heard(stage, iteration, event)
    told = (event.get(key) for key in ("switched", "repeated", "chosen", "say", "still"))
    text = next(filter(None, told), None)
    text = text or preparation(event) or _pace.line(stage, iteration, event)
    if "finished" in event:
        text = finished_text(stage, iteration, event["metrics"])
    if text:
        log(text)
    if _listener is not None:
        _listener(stage, iteration, event)


def log(text: str) -> None:
    """A line in the log of the Prefect run at hand; in a thread that knows none, in that of the
    flow run that this process began last; in this process's without one."""
    try:
        get_run_logger().info("%s", text)
    except MissingContextError:
        (_loggers[-1] if _loggers else logging.getLogger(__name__)).info("%s", text)


def _tell_still() -> None:
    if text := _pace.still():
        heard("", 0, {"still": text})


def finished_text(stage: str, iteration: int, metrics: Mapping[str, Any]) -> str:
    """An iteration or an evaluation that is finished, in one line."""
    line = {"iteration": iteration, **metrics}
    if stage == "evaluation":
        return evaluation_text(line)
    return f"iteration {iteration}: {iteration_text(line)}"


def stop_flows(outcome: str = "CANCELLED") -> None:
    """Have every flow of this process end, from any thread; may be called again and again. outcome:
    the type of state that the flows end in."""
    if not _stopped:
        _stopped.append(outcome)
    for runs_directory, note in list(_noted.values()):
        flow_ledger.end(runs_directory, note, _stopped[0])
    interrupt_all()


def stopping() -> bool:
    """Tell whether the flows of this process were told to stop."""
    return bool(_stopped)


def run_flow(flow: Flow[Any, Any], runs_directory: str | Path, **parameters: Any) -> Any:
    """Run a flow to its end, made with the tags by which it is found if it is killed early. A stop
    of an earlier flow of this process does not stop this one."""
    _stopped.clear()
    with tags(*flow_ledger.owner_tags(runs_directory)):
        return asyncio.run(flow(**parameters))


def configured(config: str, overrides: Sequence[str]) -> RunConfig | State[Any]:
    """The configuration that a flow is given, or how the flow ends that is given none."""
    guard_logging()
    try:
        return load_config(config, overrides)
    except ConfigError as error:
        return failed(error, None)


async def recorded(
    runs_directory: str | Path,
    work: Awaitable[T],
    run: Path | None = None,
    iteration: int | None = None,
    label: str | None = None,
) -> T | State[Any]:
    """Do a flow's work with a note about it; a flow that was stopped ends Cancelled, not Failed.

    run, iteration: what it works on, for whoever finds it killed. label: the run that people look
    for, if it is not `run`.
    """
    log_sentences()
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or context.flow is None:
        return await work
    runs = str(runs_directory)
    identity = str(context.flow_run.id)
    note = flow_ledger.note_of(identity, str(run.resolve()) if run else "", iteration)
    flow_ledger.write(runs, note)
    _noted[identity] = runs, note
    try:
        shown = [context.flow.name, label or (run.resolve().name if run else "")]
        await asyncio.to_thread(_tell_owner, context.flow_run, runs, shown)
        with _logged():
            value = await work
        outcome = str(value.type.value) if isinstance(value, State) else "COMPLETED"
        flow_ledger.end(runs, note, outcome)
        return value
    except Exception as error:
        if _stopped and _stopped[0] == "CANCELLED":
            flow_ledger.end(runs, note, "CANCELLED")
            return Cancelled(message="Stopped. What is finished is kept.")
        flow_ledger.end(runs, note, "FAILED")
        return failed(error, run)
    except BaseException:
        # Told to end by Prefect: the workers end now, not when somebody waits for them.
        interrupt_all()
        raise


@contextmanager
def _logged() -> Iterator[None]:
    """Have this flow run's log be that of threads, which tell of work that goes on in silence."""
    global _pace
    outermost = not _loggers
    logger = get_run_logger()
    _loggers.append(logger)
    try:
        if outermost:
            _pace = Pace()
            with ticking(_tell_still):
                yield
        else:
            yield
    finally:
        _loggers.remove(logger)


def _access() -> Access | None:
    url = PREFECT_API_URL.value()
    auth, certificate = PREFECT_API_AUTH_STRING.value(), PREFECT_API_SSL_CERT_FILE.value()
    return Access(url, auth, certificate) if url else None


def _offer(runs_directory: str) -> None:
    """Offer a run that was made just now in the forms."""
    access = _access()
    if access is not None:
        try_to_renew_runs(access, runs_directory)


async def rename(name: str) -> None:
    """Give the flow run at hand a name that was not known when it began."""
    context = FlowRunContext.get()
    if context is not None and context.flow_run is not None and context.client is not None:
        with suppress(httpx.HTTPError):
            # Its methods are typed as those of the clients with and without `await` at once.
            client: Any = context.client
            await client.set_flow_run_name(context.flow_run.id, name)


def _tell_owner(flow_run: FlowRun, runs_directory: str, shown: list[str]) -> None:
    """Tag a flow run with who runs it and with the words that people filter by."""
    access = _access()
    if access is None:
        return
    # Made by a worker, or by a program of the user's, it has none of ours.
    tags = {*flow_run.tags, *flow_ledger.owner_tags(runs_directory), *filter(None, shown)}
    with suppress(OSError, ValueError):
        labels = flow_ledger.labels_of(tags)
        access.ask(f"flow_runs/{flow_run.id}/labels", labels, method="PATCH")
        body = {"tags": sorted(tags - {f"{name}:{value}" for name, value in labels.items()})}
        access.ask(f"flow_runs/{flow_run.id}", body, method="PATCH")
    keep_reconciled(access, runs_directory)
    if flow_run.parent_task_run_id is None:
        try_to_renew_runs(access, runs_directory)


def forget(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Prefect calls this when its server has a flow run's final state."""
    runs, _ = _noted.pop(str(flow_run.id), (None, None))
    if runs is not None:
        flow_ledger.remove(runs, str(flow_run.id))


HOOKS: dict[str, Any] = {
    name: [forget] for name in ("on_completion", "on_failure", "on_cancellation", "on_crashed")
}
"""Arguments for `@flow`."""


@asynccontextmanager
async def controller_on(run: str) -> AsyncIterator[RunController]:
    """The controller on a run directory; one opened here is closed at the end."""
    known = find_controller(run)
    if known is not None:
        yield known
        return
    await wait_for(Path(run), stored_config(Path(run)).deadlines.run_in_use)
    # Read again: who had the run may have changed its configuration.
    async with opened(stored_config(Path(run))) as controller:
        controller.single_iteration = True
        yield controller


def hosts_changed(controller: RunController, error: BaseException) -> HostsChanged | None:
    """Return the loss of a host as the cause of an error that a stage raises meanwhile; None where
    no host is lost."""
    if isinstance(error, HostsChanged):
        return error
    return controller.lost_hosts() if isinstance(error, Exception) else None


@asynccontextmanager
async def opened(config: RunConfig) -> AsyncIterator[RunController]:
    """Open the run of a configuration; close it however the flow ends."""
    guard_logging()
    check_tracker(config)
    controller = await _open(config)
    await asyncio.to_thread(_offer, config.runs_directory)
    try:
        yield controller
    except BaseException as error:
        if not isinstance(error, Exception):
            # Told to end by Prefect: the run closes when its workers have ended.
            interrupt_all()
        changed = await asyncio.to_thread(hosts_changed, controller, error)
        await asyncio.to_thread(close_controller, controller, changed or error)
        # Prefect stores the message with the flow run's state.
        shown = redact_error(error)
        if changed not in (None, error):
            raise changed from shown
        if shown is not error:
            raise shown from None
        raise
    await asyncio.to_thread(close_controller, controller)


async def _open(config: RunConfig) -> RunController:
    run = Path(config.runs_directory) / config.name
    while True:
        await wait_for(run, config.deadlines.run_in_use)
        try:
            return await asyncio.to_thread(open_controller, config, Tracker, heard)
        except InUse:
            # Another flow run may have been quicker.
            if not (waits() and is_locked(run)):
                raise
