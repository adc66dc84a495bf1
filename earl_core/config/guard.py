"""What a run does about poisoned rewards, changed environments and a collapse."""

from __future__ import annotations

from typing import Literal

Guard = Literal["off", "warn", "act"]


def check_guard(guard: Guard, keep_last: int) -> None:
    """Raise `ValueError` where a run may have to go back and has nowhere to. keep_last: of
    checkpoints."""
    if guard == "act" and keep_last < 2:
        raise ValueError(
            f"guard is `act`, which goes back to a checkpoint from before what it found, and "
            f"checkpoint.keep_last is {keep_last}: raise it to 2 or more, or set guard to `warn`"
        )
