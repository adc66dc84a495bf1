"""One iteration: select → rollout → reward (and reference) → advantage → update → publish.

select ─► rollout ─┬─► reward ────┬─► advantage ─► update ─► publish
                   └─► reference ─┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from prefect import Task, flow
from prefect.futures import PrefectFuture
from prefect.task_runners import ThreadPoolTaskRunner

from earl_core.dispatch import Manifest
from flows.running import session_of
from tasks.advantage import advantage
from tasks.publish import input_weights, publish
from tasks.reference import reference
from tasks.report import finish_iteration, publish_artifacts
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.select import plan_of, select
from tasks.session import Session
from tasks.stage import StageRef, caching, resolve
from tasks.update import update


@flow(
    name="iteration",
    flow_run_name="{run} iteration {number}",
    task_runner=ThreadPoolTaskRunner(max_workers=4),
    validate_parameters=True,
)
async def iteration(run: str, number: int | None = None) -> dict[str, Any]:
    """Do one iteration of the run in directory `run`; by default the next unfinished one.

    Scheduled by itself it opens the run, ends with a checkpoint and closes the run; it fails at
    once if the run is in use. An iteration that is finished already is left alone.
    """
    async with session_of(run) as session:
        number = session.next_iteration() if number is None else number
        if number <= session.run.last_stable():
            return {"iteration": number, "finished": "earlier"}
        manifests = await run_stages(session, number)
        await asyncio.to_thread(finish_iteration, session, number, manifests)
        await publish_artifacts(session, number, manifests)
        if session.single_iteration and number + 1 >= session.config.iterations:
            session.run.finish()
        return {"iteration": number, "return": manifests["reward"].metrics.get("mean")}


async def run_stages(session: Session, k: int) -> dict[str, Manifest]:
    """Run every stage of iteration `k` that is not finished; their sealed manifests."""
    stages = Stages(session, k)
    plan = await stages.submit(select, [])
    weights = await asyncio.to_thread(
        input_weights, session, plan_of(session, await result(plan))["update"], k
    )
    played = await stages.submit(rollout, [weights], plan)
    rewards, scored = await asyncio.gather(
        stages.submit(reward, ["rollout"], plan, played),
        stages.submit(reference, ["rollout"], plan, played)
        if session.config.needs_reference
        else asyncio.sleep(0),
    )
    sources = ["rollout", "reward"] + (["reference"] if scored else [])
    judged = await stages.submit(advantage, sources, plan, played, rewards, scored)
    sources = ["rollout"] + (["reference"] if scored else []) + ["advantage"]
    updated = await stages.submit(update, sources, plan, played, judged, scored)
    await stages.submit(publish, ["update"], plan, updated)
    return stages.manifests


class Stages:
    """Submits tasks with the run directory's verdict, and collects what they sealed."""

    def __init__(self, session: Session, iteration: int) -> None:
        self.session = session
        self.iteration = iteration
        self.manifests: dict[str, Manifest] = {}

    async def submit(
        self,
        task: Task[..., StageRef],
        inputs: Sequence[str | Manifest],
        *futures: PrefectFuture[StageRef] | None,
    ) -> PrefectFuture[StageRef]:
        """Submit and wait; passing the futures on is what draws the edges of Prefect's graph."""
        digests = [
            (self.manifests[item] if isinstance(item, str) else item).data_digest()
            for item in inputs
        ]
        options = await asyncio.to_thread(caching, self.session, self.iteration, task.name, digests)
        future = task.with_options(**options).submit(
            str(self.session.run.path), self.iteration, *futures
        )
        self.manifests[task.name] = resolve(self.session, await result(future))
        return future


async def result(future: PrefectFuture[StageRef]) -> StageRef:
    """The future's result, without blocking the event loop."""
    return await asyncio.to_thread(future.result)
