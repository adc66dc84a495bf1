"""Periodic held-out evaluation inside `train`."""

from __future__ import annotations

import asyncio

from flows.iteration import Stages
from tasks.evaluate import evaluation
from tasks.publish import input_weights
from tasks.select import plan_of, select
from tasks.session import Session


async def evaluate_if_due(session: Session, version: int) -> None:
    """Evaluate policy version `version` if the configuration asks for it now.

    The first and the last version are always evaluated, so that the curve has both ends.
    """
    every = session.config.evaluation.every
    last = version == session.config.iterations
    if not every or (version % every and not last):
        return
    stages = Stages(session, version)
    plan = await stages.submit(select, [])
    chosen = plan_of(session, plan.result())
    weights = await asyncio.to_thread(input_weights, session, chosen["update"], version)
    await stages.submit(evaluation, [weights], plan)
    metrics = stages.manifests["evaluation"].metrics
    session.tracker.evaluation_finished(
        version, {f"evaluation/{name}": value for name, value in metrics.items()}
    )
    session.listener("evaluation", version, {"finished": True, "metrics": metrics})
