"""The demonstrate stage: what an iteration that imitates learns from, sealed as shards."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from earl_core.control.prompt_waves import taken_before
from earl_core.dispatch import ManifestError
from earl_core.imitation.content import CONTENT
from tasks.stage import StageInputs, stage_task

logger = logging.getLogger(__name__)


@stage_task
def demonstrate(given: StageInputs) -> dict[str, Any]:
    """Write this iteration's demonstrations as episodes that were played."""
    controller, iteration = given.controller, given.iteration
    taken = taken_before(controller.run, iteration).demonstrations
    result = controller.demonstrations("demonstrate", iteration, taken=taken)
    with suppress(ManifestError):
        before = controller.run.manifest(iteration - 1, "demonstrate").outputs
        # Seals of older releases do not say it.
        if before.get(CONTENT, result["outputs"][CONTENT]) != result["outputs"][CONTENT]:
            text = f"the demonstrations are other ones than those of iteration {iteration - 1}"
            logger.warning("iteration %d: %s: the run imitates what is there now", iteration, text)
            controller.run.note(iteration, "demonstrate", text)
    if not controller.config.imitates(iteration + 1):
        controller.groups.retire("demonstrations", 0)
    return result
