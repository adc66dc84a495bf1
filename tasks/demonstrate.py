"""The demonstrate stage: what an iteration that imitates learns from, sealed as shards."""

from __future__ import annotations

from typing import Any

from tasks.stage import StageInputs, stage_task


@stage_task
def demonstrate(given: StageInputs) -> dict[str, Any]:
    """Write this iteration's demonstrations as episodes that were played."""
    controller, iteration = given.controller, given.iteration
    result = controller.demonstrations("demonstrate", iteration)
    if not controller.config.imitates(iteration + 1):
        controller.groups.retire("demonstrations", 0)
    return result
