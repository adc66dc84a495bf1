"""Periodic held-out evaluation inside `train`."""

from __future__ import annotations

from earl_core.control.run_controller import RunController
from flows.iteration import Plan, Stages, until_done
from tasks.evaluate import evaluation


async def evaluate_if_due(controller: RunController, version: int) -> None:
    """Evaluate policy version `version` if the configuration asks for it now.

    The first and the last version are always evaluated, so that the curve has both ends.
    """
    every = controller.config.evaluation.every
    last = version == controller.config.iterations
    if not every or (version % every and not last):
        return
    stages = Stages(controller, version)

    async def play(plan: Plan) -> None:
        await stages.submit(evaluation, [await stages.input_weights(plan)], plan)

    await until_done(stages, play)
    metrics = stages.manifests["evaluation"].metrics
    controller.tracker.changed()
    controller.listener("evaluation", version, {"finished": True, "metrics": metrics})
