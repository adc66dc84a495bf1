"""Reports of a finished iteration for people: metrics, artifacts in Prefect, the tracker."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Sequence
from typing import Any

from prefect.artifacts import acreate_link_artifact, acreate_markdown_artifact

from earl_core.config import ConfigError
from earl_core.control.guard_decisions import found_in
from earl_core.control.guarding import guard_metrics, kept_for_return
from earl_core.control.resume_point import is_covered
from earl_core.control.run_controller import RunController
from earl_core.control.stage_execution import observe
from earl_core.deployment.plan import DeploymentPlan
from earl_core.deployment.stages import PLAYED, STAGES
from earl_core.dispatch import Manifest
from earl_core.run.episodes import EpisodesDamaged
from earl_core.run.kept_episodes import read_episodes
from earl_core.run.saved_versions import prune_versions, save_versions
from earl_core.secrets import shareable, shareable_names
from earl_core.selector.profile.observations import Observation
from earl_core.system import fault_points
from earl_core.system.plural import plural
from tasks.reports.curve_report import curve_page
from tasks.reports.episode_report import episodes_page
from tasks.reports.guard_report import guard_page
from tasks.reports.lines import Line
from tasks.reports.plan_report import plan_page
from tasks.reports.selector_metrics import load_metrics, selector_metrics
from tasks.tracking.run_note import mlflow_page

logger = logging.getLogger(__name__)

_EPISODES_READ = 64
"""Among which a good and a bad one are shown: reading them takes milliseconds."""


def collect_metrics(controller: RunController, manifests: dict[str, Manifest]) -> dict[str, float]:
    """All stages' metrics under `stage/name`, and what moved between the stages."""
    metrics = _stage_metrics(manifests)
    moved = [len(json.dumps(m.model_dump(mode="json"))) for m in manifests.values()]
    metrics["dispatch/manifest_bytes"] = float(sum(moved))
    # Shards of waves are named by the whole stage's manifest, too.
    stages = [manifest for name, manifest in manifests.items() if name in STAGES]
    metrics["dispatch/tensor_bytes"] = float(sum(each.tensor_bytes for each in stages))
    metrics["dispatch/shared_memory_bytes"] = float(controller.run.stores.used_bytes())
    iteration = manifests["select"].iteration
    metrics["recovery/stages_repeated"] = float(controller.losses[iteration])
    compared = manifests.get("advantage")
    metrics["recovery/without_step"] = float(compared is not None and not compared.shards)
    metrics["recovery/groups_rebuilt"] = float(controller.groups.rebuilt[iteration])
    if controller.run.spill is not None:
        # How much a crash of the machine would cost right now.
        metrics["dispatch/spill_lag_bytes"] = float(controller.run.spill.lag_bytes)
        metrics["dispatch/spilled_bytes"] = float(controller.run.spill.spilled_bytes)
    return metrics | guard_metrics(manifests) | _choice_metrics(controller, manifests)


def _stage_metrics(manifests: dict[str, Manifest]) -> dict[str, float]:
    return {
        f"{STAGES[stage].told_as or stage}/{name}": value
        for stage in STAGES
        if stage in manifests
        for name, value in manifests[stage].metrics.items()
    }


def _choice_metrics(controller: RunController, manifests: dict[str, Manifest]) -> dict[str, float]:
    plan = DeploymentPlan.model_validate(manifests["select"].outputs["plan"])
    before = controller.run.plan(plan.iteration - 1)
    seen = _seen(controller, plan.iteration)
    lines = [line for line in controller.run.metrics() if line["iteration"] < plan.iteration]
    name = "rollout/context/mean"
    contexts = [float(line[name]) for line in lines if name in line]
    played = next((manifests[name].metrics for name in PLAYED if name in manifests), {})
    return {
        **selector_metrics(plan, before, manifests, seen, controller.hardware.gpus),
        **load_metrics(played, contexts),
    }


def _seen(controller: RunController, iteration: int) -> list[Observation]:
    return [seen for seen in controller.observed.through() if seen.iteration == iteration]


def finish_iteration(
    controller: RunController, iteration: int, manifests: dict[str, Manifest]
) -> dict[str, float]:
    """Write the iteration's metrics, declare its checkpoint STABLE, wake the tracker. Returns the
    metrics."""
    metrics = collect_metrics(controller, manifests)
    run = controller.run
    # Its shards go with STABLE.
    controller.episodes.settle()
    run.append_metrics(iteration, metrics)
    fault_points.point("stable.before", iteration)
    if is_covered(run, iteration):
        save_versions(run, iteration)
        run.mark_stable(iteration)
        fault_points.point("stable.after", iteration)
        run.prune_checkpoints(kept_for_return(controller, iteration, manifests.get("advantage")))
        prune_versions(run, run.stable_iterations())
    controller.finish_iteration(iteration)
    controller.tracker.changed()
    controller.listener(
        "iteration", iteration, {"finished": True, "metrics": shareable_names(metrics)}
    )
    return metrics


async def publish_artifacts(
    controller: RunController, iteration: int, manifests: dict[str, Manifest]
) -> None:
    """Prefect's pages: the plan and its candidates, the curve, two episodes, what the guard found,
    the way to MLflow.

    manifests: up to the update's. The observations of the stages are made first. Pages that cannot
    be made or stored stop no training.
    """
    await asyncio.to_thread(observe, controller, manifests)
    try:
        await _publish(controller, iteration, manifests)
    except Exception as error:
        logger.warning(
            "the run goes on, without pages of iteration %d in Prefect: %s",
            iteration,
            error,
        )


async def _publish(
    controller: RunController, iteration: int, manifests: dict[str, Manifest]
) -> None:
    name = artifact_name(controller.config.name)
    pages = await asyncio.to_thread(_pages, controller, iteration, manifests)
    made = [
        acreate_markdown_artifact(shareable(page), key=f"{name}-{key}", description=description)
        for key, (page, description) in pages.items()
    ]
    if (link := mlflow_page(controller.run.record)) is not None:
        described = "Its metrics, evaluations, checkpoints and traces"
        text, key = "The run in MLflow", f"{name}-mlflow"
        made.append(acreate_link_artifact(link, text, key=key, description=described))
    await asyncio.gather(*made)


def artifact_name(run: str) -> str:
    """A run's name as the beginning of the keys of its artifacts."""
    return re.sub("[^a-z0-9]", "-", run.lower())


def _pages(
    controller: RunController, iteration: int, manifests: dict[str, Manifest]
) -> dict[str, tuple[str, str]]:
    plan = DeploymentPlan.model_validate(manifests["select"].outputs["plan"])
    last = {"iteration": iteration, **_stage_metrics(manifests)}
    lines = [line for line in controller.run.metrics() if line["iteration"] < iteration]
    return run_pages(controller, iteration, plan, [*lines, last])


def run_pages(
    controller: RunController, iteration: int, plan: DeploymentPlan | None, lines: Sequence[Line]
) -> dict[str, tuple[str, str]]:
    """Markdown and description of each page after an iteration, by the end of its key. plan: the
    iteration's, where there is one. lines: metrics of the iterations that are done."""
    run = controller.run
    lines = [shareable_names(line) for line in lines]
    evaluations = [
        {"iteration": m.iteration, **shareable_names(m.metrics)} for m in run.evaluations()
    ]
    pages = {
        "curve": (
            curve_page(controller.config.name, lines, evaluations),
            f"The learning curve after {plural(iteration + 1, 'iteration')}",
        )
    }
    if plan is not None:
        pages["plan"] = (
            plan_page(run, plan, run.plan(iteration - 1), _seen(controller, iteration)),
            f"The stage deployments of iteration {iteration}, and why they were chosen",
        )
    if found := found_in(run, iteration):
        page = guard_page(found, run.redaction)
        pages["guard"] = page, "What the guard has found, the newest first"
    if iteration >= 0 and (episodes := _sample_episodes(controller, iteration)):
        page = episodes_page(iteration, episodes)
        pages["episodes"] = page, f"A good and a bad episode of iteration {iteration}"
    return pages


def _sample_episodes(controller: RunController, iteration: int) -> list[dict[str, Any]]:
    run = controller.run
    controller.episodes.settle()
    try:
        found = read_episodes(run.episodes_path(iteration), run.redaction, _EPISODES_READ)
        run.redaction.check_something_left()
        return found
    except (EpisodesDamaged, ConfigError) as error:
        logger.warning("no episode is shown: %s", error)
        return []
