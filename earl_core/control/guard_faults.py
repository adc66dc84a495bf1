"""Faults of the guard itself: they are told, once each, and end no run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from earl_core.control.run_controller import RunController

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


def contained(
    controller: RunController,
    iteration: int,
    what: str,
    look: Callable[[], _Result],
    instead: _Result,
) -> _Result:
    """What `look` returns; `instead` where it raises. what: it looks at, as part of a sentence."""
    try:
        return look()
    except Exception as error:
        tell_fault(controller, iteration, what, error)
        return instead


def tell_fault(controller: RunController, iteration: int, what: str, error: Exception) -> None:
    """Say in the log and in the ledger what the guard could not do, once for each kind of error."""
    name = type(error).__name__
    if (what, name) in controller.guard_faults:
        return
    controller.guard_faults.add((what, name))
    text = f"the guard could not look at {what}, and the run goes on: {name}: {error}"
    logger.warning("iteration %d: %s", iteration, text, exc_info=error)
    controller.run.note(iteration, "guard", text)
