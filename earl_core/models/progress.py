"""Reports of the progress of making a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Progress = Callable[[dict[str, Any]], None]
"""Gets `UNIT_done` and `UNIT`, which is `steps` or `MB`."""


def quiet(done: dict[str, Any]) -> None:
    """Report to nobody."""
