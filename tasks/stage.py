"""The part that every stage's task has in common: key, verdict, execution, seal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from prefect import Task, task
from prefect.cache_policies import CacheKeyFnPolicy

from earl_core.control.run_controller import RunController, Verdict, controller_of
from earl_core.control.stage_execution import surviving
from earl_core.deployment.plan import DeploymentPlan
from earl_core.deployment.stages import in_wave
from earl_core.dispatch import Manifest
from earl_core.dispatch.shards.manifest import ShardEntry
from earl_core.secrets import redact_error
from earl_core.system import fault_points
from tasks.result_security import SERIALIZER, result_directory

StageRef = dict[str, Any]
"""What one task hands to the next: {"run", "iteration", "stage", "digest"}; never data."""

Body = Callable[[], dict[str, Any]]
"""Runs a stage; returns {"shards", "outputs", "metrics"}, each optional."""


class StageInputs(NamedTuple):
    """Inputs of a stage: the iteration's plan, and the sealed manifests it reads, by the names that
    they are sealed under.

    name: that of the stage's own seal. wave: of prompts, from 1; 0: the stage is not of a wave.
    """

    controller: RunController
    iteration: int
    plan: DeploymentPlan
    manifests: dict[str, Manifest]
    name: str
    wave: int

    @property
    def references(self) -> list[StageRef]:
        """References to the manifests, in the order of the stage's `reads`. Workers take them
        instead of the manifests, which they all see in the run directory."""
        return [reference_to(self.controller, manifest) for manifest in self.manifests.values()]


def stage_task(work: Callable[[StageInputs], dict[str, Any]]) -> Task[..., StageRef]:
    """The Prefect task of the stage that has the function's name; `work` is the stage's `Body`."""
    name = work.__name__

    def perform(
        run: str, iteration: int, plan: StageRef, *inputs: StageRef | None, wave: int = 0
    ) -> StageRef:
        controller = controller_of(run)
        sealed = [resolve(controller, reference) for reference in inputs if reference]
        manifests = {manifest.stage: manifest for manifest in sealed}
        plan_sealed, stage = plan_of(controller, plan), in_wave(name, wave)
        given = StageInputs(controller, iteration, plan_sealed, manifests, stage, wave)
        try:
            return run_stage(controller, iteration, stage, lambda: work(given))
        except Exception as error:
            # Prefect stores the message with the task run's state.
            if (shown := redact_error(error)) is not error:
                raise shown from None
            raise

    perform.__qualname__ = name  # Prefect makes the task's key of it
    return task(name=name, description=work.__doc__)(perform)


def plan_of(controller: RunController, reference: StageRef) -> DeploymentPlan:
    """The plan behind the select step's reference."""
    return DeploymentPlan.model_validate(resolve(controller, reference).outputs["plan"])


def reference_to(controller: RunController, manifest: Manifest) -> StageRef:
    """The reference to a sealed manifest."""
    return {
        "run": str(controller.run.path),
        "iteration": manifest.iteration,
        "stage": manifest.stage,
        "digest": manifest.digest,
    }


def resolve(controller: RunController, reference: StageRef) -> Manifest:
    """The sealed manifest that a reference names."""
    return controller.run.manifest(reference["iteration"], reference["stage"])


def run_stage(controller: RunController, iteration: int, stage: str, body: Body) -> StageRef:
    """Run a stage unless it was judged finished; seal it; return its reference."""
    verdict = controller.verdicts[iteration, stage]
    if verdict.known is not None:
        controller.run.note(iteration, stage, "reused")
        return reference_to(controller, verdict.known)
    fault_points.point(f"{stage}.before", iteration)
    controller.run.note(iteration, stage, "started")
    controller.listener(stage, iteration, {"stage_started": True})
    started = time.perf_counter()
    with surviving(controller, iteration, stage):
        result = body()
    shards = tuple(ShardEntry.model_validate(entry) for entry in result.get("shards", ()))
    _release_orphans(controller, iteration, stage, {entry.file for entry in shards})
    # What puts waves together knows the seconds of all.
    metrics = {"stage_seconds": time.perf_counter() - started, **result.get("metrics", {})}
    manifest = Manifest(
        run=controller.run.uid,
        iteration=iteration,
        stage=stage,
        key=verdict.key,
        policy_version=controller.run.versions.of_stage(iteration, stage),
        shards=shards,
        outputs=result.get("outputs", {}),
        metrics={name: float(value) for name, value in metrics.items() if _finite(value)},
    )
    fault_points.point(f"{stage}.seal", iteration)
    sealed = controller.run.seal(manifest)
    controller.listener(stage, iteration, {"metrics": sealed.metrics})
    fault_points.point(f"{stage}.after", iteration)
    return reference_to(controller, sealed)


def _release_orphans(controller: RunController, iteration: int, stage: str, kept: set[str]) -> None:
    """Give back shards that a rank published before it was lost, but could not report."""
    controller.run.stores.release_others(f"{iteration:06d}-{stage}-*.arrow", kept)


def caching(
    controller: RunController, iteration: int, stage: str, verdict: Verdict
) -> dict[str, Any]:
    """Options for `task.with_options`, so that Prefect shows finished stages as cached. The run
    directory decides; Prefect's own store is only told the verdict."""
    return {
        "cache_policy": CacheKeyFnPolicy(cache_key_fn=lambda context, parameters: verdict.key),
        "refresh_cache": verdict.known is None,
        "persist_result": True,
        "result_storage": result_directory(controller.run.path),
        "result_serializer": SERIALIZER,
        "task_run_name": f"{stage} {iteration}",
    }


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and value == value and abs(value) != float("inf")
