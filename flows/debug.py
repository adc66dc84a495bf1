"""The stages of an iteration one after the other, in this process and the calling thread.

The graph is that of `flows.iteration`; its tasks are called as plain functions: no Prefect server
is asked, and a debugger stops wherever the work is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from earl_core.config import RunConfig
from earl_core.control.run_controller import (
    RunController,
    RunTracker,
    Status,
    Verdict,
    close_controller,
    open_controller,
)
from earl_core.control.stage_execution import observe
from earl_core.control.worker_groups import Progress
from earl_core.deployment.plan import DeploymentPlan
from earl_core.deployment.stages import STAGES, WEIGHTS, in_wave, rounds
from earl_core.dispatch import Manifest
from flows.stage_graph import StageGraph, Work
from tasks.report import finish_iteration
from tasks.stage import StageRef, reference_to
from tasks.stage_tasks import TASKS

REPEATABLE = tuple(
    stage.name for stages in rounds(STAGES.values()) for stage in stages if stage.makes != "weights"
)
"""Stages that can be repeated by themselves."""

Result = TypeVar("Result")


class _Untracked:
    def changed(self) -> None:
        pass

    def close(self, status: Status = "FINISHED") -> None:
        pass


@contextmanager
def opened_here(config: RunConfig, listener: Progress) -> Iterator[RunController]:
    """The run of a configuration with all its worker groups in this process."""

    def untracked(run: object, hardware: object) -> RunTracker:
        return _Untracked()

    # The processes that try environments and make a model have no terminal.
    before = os.environ.get("PYTHONBREAKPOINT")
    os.environ["PYTHONBREAKPOINT"] = "0"
    try:
        controller = open_controller(config, untracked, listener, here=True)
    finally:
        os.environ.pop("PYTHONBREAKPOINT")
        if before is not None:
            os.environ["PYTHONBREAKPOINT"] = before
    try:
        yield controller
    finally:
        close_controller(controller)


class _PlainCalls:
    """Calls the stages' tasks as functions, one after another, in the calling thread. Its
    coroutines never wait, so they need no event loop."""

    def __init__(self, controller: RunController, iteration: int) -> None:
        self._controller, self._iteration = controller, iteration

    async def perform(
        self, stage: str, wave: int, verdict: Verdict, read: Sequence[Manifest]
    ) -> StageRef:
        references = [reference_to(self._controller, manifest) for manifest in read]
        of_wave = {"wave": wave} if wave else {}
        run = str(self._controller.run.path)
        return TASKS[stage].fn(run, self._iteration, *references, **of_wave)

    async def aside(self, function: Callable[..., Result], *arguments: Any) -> Result:
        return function(*arguments)

    async def together(self, works: Sequence[Work]) -> None:
        for work in works:
            await work()


def _driven(work: Coroutine[Any, Any, Result]) -> Result:
    """The result of a coroutine over plain calls. Stages may run event loops of their own."""
    try:
        work.send(None)
    except StopIteration as done:
        return cast(Result, done.value)
    work.close()
    raise RuntimeError("a plain call waited for something")


class Debugged:
    """One iteration of an open run."""

    def __init__(self, controller: RunController, iteration: int) -> None:
        self._controller, self._iteration = controller, iteration
        self._graph = StageGraph(controller, iteration, _PlainCalls(controller, iteration))

    def whole(self) -> dict[str, Manifest]:
        """Every stage, and what ends an iteration; the sealed manifests."""
        manifests = _driven(self._graph.whole())
        observe(self._controller, manifests)
        finish_iteration(self._controller, self._iteration, manifests)
        return manifests

    def repeat(self, stage: str) -> tuple[Manifest, list[str]]:
        """One stage from what is sealed of those before; which of them had to be repeated, too,
        because their shards are gone."""
        sealed = self._sealed("select")
        if sealed is None:
            _driven(self._graph.choose())
        else:
            self._graph.manifests["select"] = self._with_one_rank(sealed)
        repeated: list[str] = []
        self._need(stage, repeated, reuse=False)
        repeated.remove(stage)
        return self._graph.manifests[stage], repeated

    def _need(self, stage: str, repeated: list[str], reuse: bool) -> None:
        """Have the stage's manifest, the one that was sealed where that may and can be."""
        if stage in self._graph.manifests:
            return
        config = self._controller.config
        sources = STAGES[stage].sources(config, config.imitates(self._iteration))
        before = [each for each in sources if each != WEIGHTS]
        known = self._sealed(stage) if reuse else None
        if known is not None and all(self._sealed(each) for each in before):
            self._graph.manifests[stage] = known
            return
        for each in before:
            self._need(each, repeated, reuse=True)
        if stage == "reward" and "rollout" not in repeated:
            self._take_waves()
        _driven(self._graph.run(STAGES[stage]))
        repeated.append(stage)

    def _take_waves(self) -> None:
        """Have the waves of prompts that were played be scored again, and not played."""
        played = self._graph.manifests.get("rollout")
        waves = int(played.metrics.get("waves", 0)) if played is not None else 0
        for name in (in_wave("rollout", wave) for wave in range(1, waves + 1)):
            if (sealed := self._sealed(name)) is not None:
                self._graph.manifests[name] = sealed

    def _sealed(self, stage: str) -> Manifest | None:
        run = self._controller.run
        if not run.stage_path(self._iteration, stage).is_file():
            return None
        return run.manifest(self._iteration, stage)

    def _with_one_rank(self, sealed: Manifest) -> Manifest:
        """The sealed plan, as far as it works in one process."""
        plan = DeploymentPlan.model_validate(sealed.outputs["plan"])
        alone = {
            name: each._replace(
                replicas=1, shard=1, tensor_parallel=1, context_parallel=1, expert_parallel=1
            )
            for name, each in plan.stages.items()
        }
        plan = plan.model_copy(update={"stages": alone})
        outputs = {**sealed.outputs, "plan": plan.model_dump(mode="json")}
        return self._controller.run.seal(
            sealed.model_copy(update={"outputs": outputs, "digest": ""})
        )
