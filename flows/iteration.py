"""One iteration: select → rollout → reward (and reference) → advantage → update → publish.

select ─► rollout ─┬─► reward ────┬─► advantage ─► update ─► publish
                   └─► reference ─┘

A stage that runs out of memory, or overflows the engines' context, has `select` choose again; one
that lost ranks is tried again as it was. What was finished stays finished, and the stage is
repeated from its sealed inputs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from prefect import State, Task, flow
from prefect.context import TagsContext
from prefect.futures import PrefectFuture
from prefect.states import Cancelled, Completed
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import Field

from earl_core.config import ConfigError
from earl_core.control.failure_diagnosis import RanksLost, StageInfeasible, require_another
from earl_core.control.resume_point import resume_point
from earl_core.control.run_controller import RunController
from earl_core.control.stage_execution import judge, observe
from earl_core.dispatch import Manifest
from earl_core.selector.choice.predict import NoFeasiblePlan
from flows.flow_names import iteration_name
from flows.forms import RunPath, titled
from flows.running import HOOKS, controller_on, finished_text, hosts_changed, recorded, rename
from tasks.advantage import advantage
from tasks.publish import input_weights, publish
from tasks.reference import reference
from tasks.report import finish_iteration, publish_artifacts
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.select import select, select_inputs, share_profile
from tasks.stage import StageRef, caching, plan_of, resolve
from tasks.trust import forget_results
from tasks.update import update

Plan = PrefectFuture[StageRef]


@flow(
    name="iteration",
    flow_run_name=iteration_name,
    task_runner=ThreadPoolTaskRunner(max_workers=4),
    validate_parameters=True,
    persist_result=False,
    **HOOKS,
)
async def iteration(
    run: RunPath,
    number: Annotated[
        Annotated[int, Field(title="A number")] | Annotated[None, Field(title="The next one")],
        titled("Iteration"),
    ] = None,
) -> dict[str, Any] | State[dict[str, Any]]:
    """Do one iteration of a run, by default the next unfinished one.

    Scheduled by itself it opens the run, ends with a checkpoint and closes the run; while another
    process has the run it waits, as long as the run's `deadlines.run_in_use` says. An iteration
    that is finished already is left alone, and so is a run that has all its `iterations`: the flow
    run is then Completed under the name Skipped, so that a schedule that outlives the run raises no
    alarm, and its message says what to change. A `number` that the run does not have is a wrong
    parameter: the flow run fails with `ConfigError`. One that lost a host and is repeated by
    `train` ends Cancelled under the name Repeated.

    Args:
        run: The directory of a run, as the host of the worker sees it.
        number: Number of the iteration, counted from 0. One that is done already is skipped.
    """
    return await recorded(Path(run).parent, _numbered(run, number), Path(run), number)


async def _numbered(run: str, number: int | None) -> dict[str, Any] | State[dict[str, Any]]:
    async with controller_on(run) as controller:
        wanted = controller.config.iterations
        if number is None or 0 <= number < wanted:
            try:
                return await _one_iteration(controller, run, number)
            except Exception as error:
                # By itself an iteration is repeated by nobody.
                alone = controller.single_iteration
                changed = (
                    None if alone else await asyncio.to_thread(hosts_changed, controller, error)
                )
                if changed is None:
                    raise
                return Cancelled(
                    name="Repeated", message=f"{changed}: it is repeated on the others"
                )
        _leave(controller)
    # Outside of the controller: the parameter is wrong, the run has not failed.
    raise ConfigError(
        f"{run} has no iteration {number}: its {wanted} iterations are numbered from 0 to "
        f"{wanted - 1}; give one of them, or raise `iterations` in its config.yaml"
    )


async def _one_iteration(
    controller: RunController, run: str, number: int | None
) -> dict[str, Any] | State[dict[str, Any]]:
    if number is None:
        number = controller.next_iteration()
        await rename(f"{controller.config.name} {number}")
    due, wanted = resume_point(controller.run).iteration, controller.config.iterations
    if number < due or number >= wanted:
        _leave(controller)
        return _skipped(run, min(number, due - 1), wanted)
    manifests = await run_stages(controller, number)
    metrics = await asyncio.to_thread(finish_iteration, controller, number, manifests)
    await asyncio.to_thread(share_profile, controller)
    if resume_point(controller.run).iteration > number:
        await asyncio.to_thread(forget_results, controller.run.path)
    _leave(controller)
    line = finished_text("iteration", number, metrics)
    return {"iteration": number, "return": manifests["reward"].metrics.get("mean"), "line": line}


def _leave(controller: RunController) -> None:
    """Free what a run keeps for its next iteration, if it has none and nobody else ends it."""
    if controller.single_iteration and controller.next_iteration() >= controller.config.iterations:
        controller.run.finish()


def _skipped(run: str, number: int, wanted: int) -> State[dict[str, Any]]:
    message = (
        f"iteration {number} of {run} is done already: give no number for the next one"
        if number + 1 < wanted
        else f"all {wanted} iterations of {run} are done: to go on, raise `iterations` in its "
        "config.yaml"
    )
    return Completed(name="Skipped", message=message, data={"iteration": number, "skipped": True})


async def run_stages(controller: RunController, k: int) -> dict[str, Manifest]:
    """Run every stage of iteration `k` that is not finished; their sealed manifests."""
    stages = Stages(controller, k)
    await until_done(stages, lambda plan: _after_select(stages, plan))
    return stages.manifests


async def _after_select(stages: Stages, plan: Plan) -> None:
    controller = stages.controller
    weights = await stages.input_weights(plan)
    played = await stages.submit(rollout, [weights], plan)
    rewards, scored = await _both(
        stages.submit(reward, ["rollout"], plan, played),
        stages.submit(reference, ["rollout"], plan, played)
        if controller.config.needs_reference
        else asyncio.sleep(0),
    )
    controller.episodes.begin(stages.manifests["rollout"], stages.manifests["reward"])
    sources = ["rollout", "reward"] + (["reference"] if scored else [])
    judged = await stages.submit(advantage, sources, plan, played, rewards, scored)
    sources = ["rollout"] + (["reference"] if scored else []) + ["advantage"]
    updated = await stages.submit(update, sources, plan, played, judged, scored)
    # The pages take a tenth of a second, which the weights take too.
    await _both(
        stages.submit(publish, ["update"], plan, updated),
        publish_artifacts(controller, stages.iteration, dict(stages.manifests)),
    )


async def until_done(stages: Stages, work: Callable[[Plan], Awaitable[None]]) -> None:
    """Choose a plan and do `work` under it; again as often as a stage is infeasible and there is
    another candidate to try, or lost ranks and may be repeated.

    Raises what the stage raised when the same stage deployment comes back, `NoFeasiblePlan` when
    none is left. Each such error rules out a candidate, or doubles the engines' context, and losses
    are counted, so this comes to an end.
    """
    infeasible = None
    while True:
        plan = await stages.choose(infeasible)
        controller, chosen = stages.controller, plan_of(stages.controller, await result(plan))
        await asyncio.to_thread(controller.start_ahead, chosen)
        try:
            return await work(plan)
        except StageInfeasible as error:
            infeasible = error
            if "rollout" in stages.manifests:
                # What is done already tells the next choice more.
                await asyncio.to_thread(observe, controller, stages.manifests)
        except RanksLost:
            infeasible = None


class Stages:
    """Submits tasks with the run directory's verdict, and collects what they sealed."""

    def __init__(self, controller: RunController, iteration: int) -> None:
        self.controller = controller
        self.iteration = iteration
        self.manifests: dict[str, Manifest] = {}
        self._done: dict[str, PrefectFuture[StageRef]] = {}

    async def choose(self, infeasible: StageInfeasible | None = None) -> Plan:
        """The plan; another one than that under which a stage was infeasible."""
        inputs = select_inputs(self.controller, self.iteration)
        try:
            plan = await self._submit(select, inputs)
        except NoFeasiblePlan as nothing:
            raise nothing from infeasible
        if infeasible is not None:
            require_another(infeasible, plan_of(self.controller, await result(plan)))
        return plan

    async def input_weights(self, plan: Plan) -> Manifest:
        """The weights that the iteration starts from."""
        learner = plan_of(self.controller, await result(plan)).stages["update"]
        return await asyncio.to_thread(input_weights, self.controller, learner, self.iteration)

    async def submit(
        self,
        task: Task[..., StageRef],
        inputs: Sequence[str | Manifest],
        *futures: PrefectFuture[StageRef] | None,
    ) -> PrefectFuture[StageRef]:
        """Submit and wait; passing the futures on is what draws the edges of Prefect's graph.

        What was done before under another plan is not submitted again.
        """
        if task.name not in self._done:
            digests = [
                (self.manifests[item] if isinstance(item, str) else item).data_digest()
                for item in inputs
            ]
            self._done[task.name] = await self._submit(task, digests, *futures)
        return self._done[task.name]

    async def _submit(
        self,
        task: Task[..., StageRef],
        digests: Sequence[str],
        *futures: PrefectFuture[StageRef] | None,
    ) -> PrefectFuture[StageRef]:
        verdict = await asyncio.to_thread(
            judge, self.controller, self.iteration, task.name, digests
        )
        options = caching(self.controller, self.iteration, task.name, verdict)
        # For a task run with tags Prefect asks its server for the tags' limits, which takes two
        # seconds after most stages that were long.
        with TagsContext(current_tags=set()):
            future = task.with_options(**options).submit(
                str(self.controller.run.path), self.iteration, *futures
            )
        self.manifests[task.name] = resolve(self.controller, await result(future))
        return future


async def _both(first: Awaitable[Any], second: Awaitable[Any]) -> tuple[Any, Any]:
    """Wait for both, also when one fails: nothing of the iteration goes on behind its back."""
    done = await asyncio.gather(first, second, return_exceptions=True)
    for item in done:
        if isinstance(item, BaseException):
            raise item
    return done[0], done[1]


async def result(future: PrefectFuture[StageRef]) -> StageRef:
    """The future's result, without blocking the event loop."""
    return await asyncio.to_thread(future.result)
