"""Ranks that are lost at work: said, counted, and the stage that they cost repeated."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from earl_core.control.failure_diagnosis import RanksLost, loss_of
from earl_core.control.run_controller import RunController

_counting = threading.Lock()


@contextmanager
def surviving(controller: RunController, iteration: int, stage: str) -> Iterator[None]:
    """Around a stage's work: raises `RanksLost` for lost ranks while the iteration has repeats
    left (`deadlines.repeats`), `HostsChanged` where their host is lost; all else passes, and so
    does a loss once there are none."""
    try:
        yield
    except Exception as error:
        lost = loss_of(error)
        if lost is None or controller.stop_requested.is_set():
            raise
        if (changed := controller.lost_hosts()) is not None:
            raise changed from error
        with _counting:
            controller.losses[iteration] += 1
            losses = controller.losses[iteration]
        most = controller.config.deadlines.repeats
        rank = "" if lost.rank is None else f" rank {lost.rank}"
        what = f"worker group '{lost.where.role}'{rank} was lost ({lost.reason.rstrip('.')})"
        if losses > most:
            controller.run.note(iteration, stage, f"{what}; not repeated, loss {losses} of {most}")
            raise
        text = f"{stage}: {what}; the stage is repeated from its sealed inputs ({losses} of {most})"
        controller.run.note(iteration, stage, text)
        controller.listener(stage, iteration, {"repeated": text})
        raise RanksLost(text) from error
