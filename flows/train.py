"""The training loop."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, deque
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from prefect import State, flow
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import Field

from earl_core.config import ConfigError, RunConfig
from earl_core.control.device_moves import forget, may_divide_anew
from earl_core.control.engine_turns import EngineTurns
from earl_core.control.prompt_waves import follows_seal
from earl_core.control.resume_point import StateLost, resume_point
from earl_core.control.run_controller import BranchBegun, HostsChanged, RunController
from earl_core.secrets import shareable_names
from earl_core.selector.choice.prediction import NoFeasiblePlan
from flows.flow_names import train_name
from flows.forms import AtLeastOne, Config, Overrides, Unset, titled
from flows.iteration import PrefectRunner, iteration
from flows.overlap import LEFT, Overlap, overlapping
from flows.running import HOOKS, configured, heard, log, opened, recorded, stopping
from flows.stage_graph import StageGraph
from tasks.result_security import forget_results
from tasks.select import select_inputs
from tasks.train_pages import TrainPages


@flow(
    name="train",
    flow_run_name=train_name,
    task_runner=ThreadPoolTaskRunner(max_workers=2),  # type: ignore[arg-type]
    persist_result=False,
    **HOOKS,
)
async def train(
    config: Config = "tictactoe_tiny",
    name: Annotated[
        Annotated[str, Field(title="A name")] | Unset, titled("Name of the run")
    ] = None,
    begin_from: Annotated[
        Annotated[str, Field(title="A run or a model")] | Unset, titled("Begin from")
    ] = None,
    iterations: Annotated[AtLeastOne | Unset, titled("Iterations")] = None,
    seed: Annotated[Annotated[int, Field(title="A number")] | Unset, titled("Random seed")] = None,
    prompts_per_iteration: Annotated[AtLeastOne | Unset, titled("Prompts per iteration")] = None,
    group_size: Annotated[AtLeastOne | Unset, titled("Group size")] = None,
    learning_rate: Annotated[
        Annotated[float, Field(title="A number", gt=0)] | Unset, titled("Peak learning rate")
    ] = None,
    overrides: Overrides = [],  # noqa: B006  (Prefect copies parameters; a tuple has no form)
) -> dict[str, Any] | State[Any]:
    """Train until all iterations are done; a run that exists is continued.

    Args:
        config: A recipe, or the path of a run file, as the host of the worker sees it.
        name: Name of the run and of its directory. A run of this name is continued.
        begin_from: Weights to begin a new run with: of another run (`RUN`, `RUN@12`), of a model
            directory or of a model of the hub. The setting `model.from`.
        iterations: Number of iterations in all, those that are done already included.
        seed: Random seed of the run.
        prompts_per_iteration: Number of prompts (starting states) of an iteration.
        group_size: Number of episodes for each prompt.
        learning_rate: Peak learning rate, after the warm-up.
        overrides: Further settings, each as a.b=c; a secret as env:NAME or file:PATH.
    """
    common = {
        "name": name,
        "iterations": iterations,
        "seed": seed,
        "rollout.prompts_per_iteration": prompts_per_iteration,
        "rollout.group_size": group_size,
        "update.learning_rate": learning_rate,
    }
    given = [f"{key}={value}" for key, value in common.items() if value is not None]
    # A run may be called 7.
    given += [f"model.from={json.dumps(begin_from)}"] if begin_from is not None else []
    settings = configured(config, [*given, *overrides])
    if isinstance(settings, State):
        return settings
    runs = Path(settings.runs_directory)
    return await recorded(runs, _train(settings), runs / settings.name)


async def _train(settings: RunConfig) -> dict[str, Any]:
    """Train on the hosts that there are; once they change, on the others, from the last state; and
    in a new branch, where the guard has the run go back."""
    changes: Counter[int] = Counter()
    changed: HostsChanged | None = None
    while True:
        try:
            return await _train_on_hosts(settings, changes)
        except HostsChanged as error:
            if stopping() or changes[error.iteration] >= settings.deadlines.repeats:
                raise
            changes[error.iteration] += 1
            # Not the error itself, whose traceback holds all that was closed.
            changed = HostsChanged(str(error), error.iteration)
            heard("hosts", error.iteration, {"repeated": f"{error}: the run is opened again"})
        except BranchBegun:
            if stopping():
                raise
        except ConfigError as error:
            if changed is None:
                raise
            raise HostsChanged(f"{changed}; {error}", changed.iteration) from error


async def _train_on_hosts(settings: RunConfig, changes: Counter[int]) -> dict[str, Any]:
    async with opened(settings) as controller:
        # What `auto` is has been decided.
        settings = controller.config
        run = str(controller.run.path)
        returned: set[tuple[int, str, int]] = set()
        pages = TrainPages(controller)
        step = _side_by_side if overlaps(settings) else _one_after_another
        while (number := controller.next_iteration()) < settings.iterations:
            if not changes[number]:
                await asyncio.to_thread(controller.check_growth)
            try:
                await step(controller, number, pages)
            except StateLost:
                # Side by side, earlier ones have ended meanwhile: the oldest open one has failed.
                number = controller.next_iteration()
                if not _may_go_back(controller, number, returned):
                    raise
                controller.go_back()
                forget(controller)
            except NoFeasiblePlan as error:
                # Beside rollouts that run ahead devices stay where they are. Those have ended.
                number = controller.next_iteration()
                if not await asyncio.to_thread(may_divide_anew, controller):
                    raise
                text = f"the devices are divided anew: {error}".partition("\n")[0]
                controller.run.note(number, "select", text)
                heard("select", number, {"repeated": text})
        # Where `iterations` was lowered, no checkpoint need hold the last version that it asks for.
        if controller.next_iteration() == settings.iterations:
            last = settings.iterations
            # Those that no rollout has played, as well.
            for version in range(controller.run.versions.played(last - 1) + 1, last + 1):
                await _evaluate_if_due(controller, version)
        pages.changed()
        await pages.settle()
        forget_results(controller.run.path)
        controller.run.finish()
        return {"run": run, "iterations": settings.iterations}


async def _one_after_another(controller: RunController, number: int, pages: TrainPages) -> None:
    """Do one iteration, and the evaluation before it if one is due."""
    if await _evaluate_played(controller, number):
        pages.changed()
    _tell(number, await _child(str(controller.run.path), number), pages)


async def _side_by_side(controller: RunController, number: int, pages: TrainPages) -> None:
    """Do all iterations from this one on, as many at a time as the staleness lets begin.

    An iteration that fails lets those before it end first, and ends those that run ahead of it;
    what these have sealed stays.
    """
    settings, run = controller.config, controller.run.path
    asked = partial(_apart, controller), partial(_evaluate_played, controller)
    overlap, loop = Overlap(settings.schedule.staleness, number, *asked), asyncio.get_running_loop()

    def left(k: int) -> None:
        asyncio.run_coroutine_threadsafe(overlap.passed(k, LEFT), loop)

    controller.turns = EngineTurns(left)
    open_: deque[asyncio.Task[dict[str, Any]]] = deque()

    async def oldest_ended() -> None:
        done = await open_[0]
        open_.popleft()
        _tell(int(done["iteration"]), done, pages)

    with overlapping(run, overlap):
        try:
            for k in range(number, settings.iterations):
                if k > number and await asyncio.to_thread(controller.grows_after, k - 1):
                    # Those that run ahead end first; then the run is opened again.
                    break
                open_.append(asyncio.create_task(_child(str(run), k)))
                begun = asyncio.create_task(overlap.begun(k))
                await asyncio.wait({begun, open_[-1]}, return_when=asyncio.FIRST_COMPLETED)
                begun.cancel()
                if k - number >= settings.schedule.staleness:
                    await oldest_ended()
            while open_:
                await oldest_ended()
        finally:
            if open_:
                await overlap.stop("an earlier iteration failed")
                controller.turns.stop("an earlier iteration failed")
                # Whoever plays is cut off.
                await asyncio.to_thread(controller.groups.retire, "rollout", 0)
                await asyncio.gather(*open_, return_exceptions=True)


async def _child(run: str, number: int) -> dict[str, Any]:
    done: Any = await iteration(run, number)
    return dict(done)


def _tell(number: int, done: dict[str, Any], pages: TrainPages) -> None:
    """Say what an iteration did. Raises `BranchBegun` where it has the run go back."""
    line = done.get("line", f"iteration {number} was done before")
    if done.get("returned"):
        raise BranchBegun(line)
    log(line)
    pages.changed()


async def _evaluate_played(controller: RunController, number: int) -> bool:
    """Evaluate the version that the iteration's rollout plays, if it is the first to play it and
    the configuration asks for it; whether it does."""
    played = controller.run.versions.played(number)
    return _is_first(controller, number) and await _evaluate_if_due(controller, played)


def _is_first(controller: RunController, number: int) -> bool:
    """Tell whether the iteration's rollout is the first to play its version."""
    played = controller.run.versions.played
    return number == 0 or played(number) > played(number - 1)


def _apart(controller: RunController, number: int) -> bool:
    """Tell whether engines begin the iteration's rollout only when all have ended the one before:
    because its prompts follow from that one's seal, to evaluate its version first, or to change."""
    config, run = controller.config, controller.run
    if follows_seal(config):
        return True
    if _is_first(controller, number) and config.evaluates(run.versions.played(number)):
        return True
    plans = run.plan(number), run.plan(number - 1)
    engines = [plan and plan.stages.get("rollout") for plan in plans]
    return engines[0] != engines[1]


def overlaps(settings: RunConfig) -> bool:
    """Tell whether iterations run side by side, or may; colocated stages take turns anyway."""
    beside = settings.divides or settings.stages.placed.side_by_side
    return settings.schedule.pinned > 0 and beside


def _may_go_back(
    controller: RunController, number: int, returned: set[tuple[int, str, int]]
) -> bool:
    """Tell whether to repeat the iterations that followed the last checkpoint, because the state
    since then is lost.

    Once for each choice of the iteration in which that was noticed, and for each loss of ranks that
    was counted there, because a state lost again under the same plan would be lost for ever.
    """
    attempt = "".join(select_inputs(controller, number))
    place = number, attempt, controller.losses[number]
    if resume_point(controller.run).iteration >= number or place in returned:
        return False
    returned.add(place)
    text = "the training state was lost with its ranks: back to the last checkpoint"
    controller.run.note(number, "update", text)
    controller.listener("update", number, {"repeated": text})
    return True


async def _evaluate_if_due(controller: RunController, version: int) -> bool:
    """Evaluate policy version `version` if the configuration asks for it; whether it does."""
    if not controller.config.evaluates(version):
        return False
    graph = StageGraph(controller, version, PrefectRunner(controller, version))
    metrics = (await graph.evaluation()).metrics
    controller.tracker.changed()
    controller.listener(
        "evaluation", version, {"finished": True, "metrics": shareable_names(metrics)}
    )
    return True
