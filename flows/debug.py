"""The stages of an iteration one after the other, in this process and the calling thread.

The stages are those of `flows.iteration`, whose tasks are called as plain functions: no Prefect
server is asked, and a debugger stops wherever the work is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from prefect import Task

from earl_core.config import RunConfig
from earl_core.control.failure_diagnosis import StageInfeasible, require_another
from earl_core.control.run_controller import (
    RunController,
    RunTracker,
    Status,
    close_controller,
    open_controller,
)
from earl_core.control.stage_execution import judge, observe
from earl_core.control.worker_groups import Progress
from earl_core.deployment.plan import DeploymentPlan
from earl_core.dispatch import Manifest
from tasks.advantage import advantage
from tasks.publish import input_weights, publish
from tasks.reference import reference
from tasks.report import finish_iteration
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.select import select, select_inputs
from tasks.stage import StageRef, plan_of, reference_to
from tasks.update import update

_TASKS: Mapping[str, Task[..., StageRef]] = {
    "rollout": rollout,
    "reward": reward,
    "reference": reference,
    "advantage": advantage,
    "update": update,
    "publish": publish,
}
_READ = {
    "rollout": (),
    "reward": ("rollout",),
    "reference": ("rollout",),
    "advantage": ("rollout", "reward", "reference"),
    "update": ("rollout", "reference", "advantage"),
    "publish": ("update",),
}
"""The stages whose results each stage reads."""

STAGES = tuple(stage for stage in _TASKS if stage != "publish")
"""What can be repeated by itself."""


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


class Debugged:
    """One iteration of an open run."""

    def __init__(self, controller: RunController, iteration: int) -> None:
        self._controller, self._iteration = controller, iteration
        self._manifests: dict[str, Manifest] = {}
        self._stages = [
            stage for stage in _TASKS if stage != "reference" or controller.config.needs_reference
        ]

    def whole(self) -> dict[str, Manifest]:
        """Every stage, and what ends an iteration; the sealed manifests."""
        self._choose()
        infeasible: StageInfeasible | None = None
        while True:
            try:
                for stage in self._stages:
                    if stage not in self._manifests:
                        self._execute(stage)
                break
            except StageInfeasible as error:
                infeasible = error
                self._choose(infeasible)
        observe(self._controller, self._manifests)
        finish_iteration(self._controller, self._iteration, self._manifests)
        return self._manifests

    def repeat(self, stage: str) -> tuple[Manifest, list[str]]:
        """One stage from what is sealed of those before; which of them had to be repeated, too,
        because their shards are gone."""
        sealed = self._sealed("select")
        if sealed is None:
            self._choose()
        else:
            self._manifests["select"] = self._with_one_rank(sealed)
        repeated: list[str] = []
        self._need(stage, repeated, reuse=False)
        repeated.remove(stage)
        return self._manifests[stage], repeated

    def _need(self, stage: str, repeated: list[str], reuse: bool) -> bool:
        """Have the stage's manifest; whether it is the one that was sealed."""
        if stage in self._manifests:
            return stage not in repeated
        before = [each for each in _READ[stage] if each in self._stages]
        known = self._sealed(stage) if reuse else None
        if known is not None and all(self._sealed(each) for each in before):
            self._manifests[stage] = known
            return True
        for each in before:
            self._need(each, repeated, reuse=True)
        self._execute(stage)
        repeated.append(stage)
        return False

    def _sealed(self, stage: str) -> Manifest | None:
        run = self._controller.run
        if not run.stage_path(self._iteration, stage).is_file():
            return None
        return run.manifest(self._iteration, stage)

    def _with_one_rank(self, sealed: Manifest) -> Manifest:
        """The sealed plan, as far as it works in one process."""
        plan = DeploymentPlan.model_validate(sealed.outputs["plan"])
        alone = {
            name: each._replace(replicas=1, shard=1, tensor_parallel=1, context_parallel=1)
            for name, each in plan.stages.items()
        }
        plan = plan.model_copy(update={"stages": alone})
        outputs = {**sealed.outputs, "plan": plan.model_dump(mode="json")}
        return self._controller.run.seal(
            sealed.model_copy(update={"outputs": outputs, "digest": ""})
        )

    def _choose(self, infeasible: StageInfeasible | None = None) -> None:
        inputs = select_inputs(self._controller, self._iteration)
        judge(self._controller, self._iteration, "select", inputs)
        self._take("select", select.fn(str(self._controller.run.path), self._iteration))
        if infeasible is not None:
            plan = reference_to(self._controller, self._manifests["select"])
            require_another(infeasible, plan_of(self._controller, plan))

    def _execute(self, stage: str) -> None:
        controller, iteration = self._controller, self._iteration
        plan = reference_to(controller, self._manifests["select"])
        read = [self._manifests[each] for each in _READ[stage] if each in self._manifests]
        digests = [manifest.data_digest() for manifest in read]
        if stage == "rollout":
            learner = plan_of(controller, plan).stages["update"]
            digests = [input_weights(controller, learner, iteration).data_digest()]
        judge(controller, iteration, stage, digests)
        references = [reference_to(controller, manifest) for manifest in read]
        self._take(stage, _TASKS[stage].fn(str(controller.run.path), iteration, plan, *references))

    def _take(self, stage: str, sealed: StageRef) -> None:
        self._manifests[stage] = self._controller.run.manifest(sealed["iteration"], stage)
