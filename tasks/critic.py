"""The critic stage: optimizer steps of the critic on the iteration's returns."""

from __future__ import annotations

from typing import Any

from tasks.stage import StageInputs, stage_task
from tasks.update import trained


@stage_task
def critic(given: StageInputs) -> dict[str, Any]:
    """Train the critic on what the episodes returned, once."""
    return trained(given, "critic")[1]
