"""One iteration: select → rollout → reward (and reference) → advantage → update → publish.

select ─► rollout ─┬─► reward ────┬─► advantage ─► update ─► publish
                   └─► reference ─┘

One that imitates has `demonstrate` instead of all from rollout to advantage.

`flows.stage_graph` says what follows on what; here it runs as a flow of Prefect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from prefect import State, flow
from prefect.context import TagsContext
from prefect.futures import PrefectFuture
from prefect.states import Cancelled, Completed
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import Field

from earl_core.config import ConfigError
from earl_core.control.consequences import GoesBack, begin_return
from earl_core.control.engine_turns import LeftAhead
from earl_core.control.resume_point import resume_point
from earl_core.control.run_controller import RunController, Verdict, find_controller
from earl_core.deployment.stages import in_wave
from earl_core.dispatch import Manifest
from earl_core.run.recovery import complete_return
from earl_core.system.errors import InUse
from flows.flow_names import iteration_name
from flows.forms import RunPath, titled
from flows.overlap import BEGUN, END, overlap_of
from flows.running import HOOKS, controller_on, finished_text, hosts_changed, recorded, rename
from flows.stage_graph import Result, StageGraph, Work
from tasks.report import finish_iteration, publish_artifacts
from tasks.result_security import forget_results
from tasks.select import share_profile
from tasks.stage import StageRef, caching
from tasks.stage_tasks import TASKS

RETURNED = "Returned"
"""The state of a flow run in which the run goes back."""


@flow(
    name="iteration",
    flow_run_name=iteration_name,
    task_runner=ThreadPoolTaskRunner(max_workers=4),  # type: ignore[arg-type]
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
    alarm, and its message says what to change. Where the guard has the run go back, the iteration
    ends without an update, Completed under the name Returned, and the next one goes on in the new
    branch. A `number` that the run does not have is a wrong parameter: the flow run fails with
    `ConfigError`. One that lost a host and is repeated by `train` ends Cancelled under the name
    Repeated.

    Args:
        run: The directory of a run, as the host of the worker sees it.
        number: Number of the iteration, counted from 0. One that is done already is skipped.
    """
    return await recorded(Path(run).parent, _numbered(run, number), Path(run), number)


async def _numbered(run: str, number: int | None) -> dict[str, Any] | State[dict[str, Any]]:
    alone = find_controller(run) is None
    done = await _on_its_controller(run, number)
    if alone and isinstance(done, State) and done.name == RETURNED:
        # Whoever has opened it meanwhile has done it.
        with suppress(InUse):
            await asyncio.to_thread(complete_return, Path(run))
    return done


async def _on_its_controller(
    run: str, number: int | None
) -> dict[str, Any] | State[dict[str, Any]]:
    async with controller_on(run) as controller:
        wanted = controller.config.iterations
        if number is None or 0 <= number < wanted:
            try:
                return await _one_iteration(controller, run, number)
            except GoesBack as told:
                return await _returned(controller, told)
            except Exception as error:
                if isinstance(error, LeftAhead):
                    return Cancelled(name="Repeated", message=str(error))
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
    overlap = overlap_of(controller.run.path)
    if overlap is not None:
        await overlap.passed(number, BEGUN)
    manifests = await run_stages(controller, number)
    if overlap is not None:
        await overlap.before_end(number)
    metrics = await asyncio.to_thread(finish_iteration, controller, number, manifests)
    await asyncio.to_thread(share_profile, controller)
    if overlap is not None:
        # Others still read theirs.
        await overlap.passed(number, END)
    elif resume_point(controller.run).iteration > number:
        await asyncio.to_thread(forget_results, controller.run.path)
    _leave(controller)
    line = finished_text("iteration", number, metrics)
    reward = manifests.get("reward")
    mean = None if reward is None else reward.metrics.get("mean")
    return {"iteration": number, "return": mean, "line": line}


async def _returned(controller: RunController, told: GoesBack) -> State[dict[str, Any]]:
    """Note that the run goes back, once the iteration before has ended, whose checkpoint may be the
    one."""
    overlap = overlap_of(controller.run.path)
    if overlap is not None:
        await overlap.before_end(told.iteration)
    branch = await asyncio.to_thread(begin_return, controller, told)
    line = f"the run goes back: branch {branch.number} begins. {branch.text}"
    controller.listener("advantage", told.iteration, {"repeated": line})
    data = {"iteration": told.iteration, "return": None, "line": line, "returned": True}
    return Completed(name=RETURNED, message=line, data=data)


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

    async def pages() -> None:
        # They take a tenth of a second, which the weights take too.
        await publish_artifacts(controller, k, dict(graph.manifests))

    overlap = overlap_of(controller.run.path)
    graph = StageGraph(controller, k, PrefectRunner(controller, k), pages, overlap)
    return await graph.whole()


class PrefectRunner:
    """Submits the stages' tasks with the run directory's verdict."""

    def __init__(self, controller: RunController, iteration: int) -> None:
        self._controller, self._iteration = controller, iteration
        self._futures: dict[str, PrefectFuture[StageRef]] = {}

    async def perform(
        self, stage: str, wave: int, verdict: Verdict, read: Sequence[Manifest]
    ) -> StageRef:
        """Submit and wait; passing the futures on is what draws the edges of Prefect's graph."""
        name = in_wave(stage, wave)
        options = caching(self._controller, self._iteration, name, verdict)
        # For a task run with tags Prefect asks its server for the tags' limits, which takes two
        # seconds after most stages that were long.
        with TagsContext(current_tags=set()):
            future = (
                TASKS[stage]
                .with_options(**options)
                .submit(
                    str(self._controller.run.path),
                    self._iteration,
                    *(self._futures[manifest.stage] for manifest in read),
                    **({"wave": wave} if wave else {}),
                )
            )
        # Without blocking the event loop.
        sealed = await asyncio.to_thread(future.result)
        self._futures[name] = future
        return sealed

    async def aside(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call it in another thread."""
        return await asyncio.to_thread(function, *arguments)

    async def together(self, works: Sequence[Work]) -> None:
        """Wait for all, also when one fails: nothing of the iteration goes on behind its back."""
        done = await asyncio.gather(*(work() for work in works), return_exceptions=True)
        for item in done:
            if isinstance(item, BaseException):
                raise item
