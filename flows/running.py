"""Opening a run for a flow: found if this process has it open, else opened and closed here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from earl_core.config import ConfigError, RunConfig, load_config
from earl_core.secrets import guard_logging, redact_error
from flows.reaper import register_flow_run
from tasks.session import Session, close_session, find_session, open_session
from tasks.trust import distrust_servers

distrust_servers()

_listener: Callable[[str, int, dict[str, Any]], None] | None = None


def set_listener(listener: Callable[[str, int, dict[str, Any]], None] | None) -> None:
    """Have sessions opened in this process report their progress, for a display."""
    global _listener
    _listener = listener


@asynccontextmanager
async def session_of(run: str) -> AsyncIterator[Session]:
    """The session on a run directory; one opened here is closed at the end."""
    known = find_session(run)
    if known is not None:
        yield known
        return
    stored = Path(run) / "config.yaml"
    if not stored.is_file():
        raise ConfigError(
            f"{run} is not a run directory (no config.yaml): start the run with `earl train` or "
            "the `train` deployment first"
        )
    config = load_config(stored).model_copy(
        update={"name": Path(run).name, "runs_directory": str(Path(run).parent)}
    )
    async with opened(config) as session:
        session.single_iteration = True
        yield session


@asynccontextmanager
async def opened(config: RunConfig) -> AsyncIterator[Session]:
    """Open the run of a configuration; close it however the flow ends."""
    guard_logging()
    session = await asyncio.to_thread(open_session, config, _listener)
    with register_flow_run(config.runs_directory):
        try:
            yield session
        except BaseException as error:
            await asyncio.to_thread(close_session, session, failed=True)
            # Prefect stores the message with the flow run's state.
            redact_error(error)
            raise
        await asyncio.to_thread(close_session, session)
