"""Messages of a failed flow in Prefect: one sentence, and the command that goes on.

Prefect logs a traceback for each exception that leaves a task, a flow and the process. For an error
of ours its text is logged instead, unless Prefect logs at DEBUG.
"""

from __future__ import annotations

import logging
import shlex
from pathlib import Path
from typing import Any

from prefect import State
from prefect.exceptions import TerminationSignal
from prefect.logging import get_run_logger
from prefect.states import Failed

from earl_core.cluster.errors import WorkerCallFailed, WorkerError
from earl_core.config import ConfigError
from earl_core.secrets import shareable
from earl_core.system.errors import EarlError

_LOGGERS = ("prefect.flow_runs", "prefect.task_runs", "prefect.engine", "asyncio")


class _Sentences(logging.Filter):
    """Puts the text of an error of ours in the place of its traceback; leaves out the signal that
    ends a flow, which Prefect reports in words too."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is None or logging.getLogger(record.name).isEnabledFor(logging.DEBUG):
            return True
        if isinstance(error, TerminationSignal):
            return False
        if isinstance(error, EarlError):
            record.msg, record.args = shareable(str(error)), ()
            record.exc_info = record.exc_text = None
        return True


def log_sentences() -> None:
    """Have Prefect's loggers print no traceback of errors of ours, in this process."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(known, _Sentences) for known in logger.filters):
            logger.addFilter(_Sentences())


def sentence(error: BaseException) -> str:
    """Say what went wrong, without the worker's log and without a traceback."""
    if isinstance(error, WorkerCallFailed) and error.expected:
        return error.raised.message
    if isinstance(error, WorkerError):
        place = error.where.sentence()
        log = f" (its log: {error.where.log_path})" if error.where.log_path else ""
        return f"{place[0].upper()}{place[1:]}{log}: {error.reason}"
    return str(error) if isinstance(error, EarlError) else f"{type(error).__name__}: {error}"


def failed(error: Exception, run: Path | None) -> State[Any]:
    """The final state of a flow that failed; whoever waits for the flow gets the exception.

    run: the directory of the run that it worked on; the message ends with the command that goes on
    with it, unless the input was wrong.
    """
    text = shareable(sentence(error))
    if not isinstance(error, EarlError):
        get_run_logger().error("%s", text, exc_info=error)
    if run is not None and (run / "config.yaml").is_file() and not _wrong_input(error):
        text = f"{text.rstrip('.')}. Continue with: earl resume {shlex.quote(str(run.resolve()))}"
    return Failed(message=text, data=error)


def _wrong_input(error: Exception) -> bool:
    return isinstance(error, EarlError) and error.exit_code == ConfigError.exit_code
