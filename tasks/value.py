"""The value stage: what the critic expects of the samples, before it is trained on them."""

from __future__ import annotations

from typing import Any

from tasks.reference import scored
from tasks.stage import StageInputs, stage_task


@stage_task
def value(given: StageInputs) -> dict[str, Any]:
    """Ask the critic what it expects at each time step of the rollout's samples."""
    return scored(given, "value", "score_values")
