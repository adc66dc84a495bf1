"""What a finished iteration leaves for people: metrics, artifacts in Prefect, the tracker."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from prefect.artifacts import acreate_markdown_artifact

from earl_core.config.run import STAGES
from earl_core.control.resume_point import is_updated
from earl_core.control.run_controller import RunController
from earl_core.control.stage_execution import observe
from earl_core.deployment.plan import DeploymentPlan
from earl_core.dispatch import Manifest
from earl_core.run.episodes import EpisodesDamaged, read_episodes
from earl_core.secrets import redact
from earl_core.selector.profile.observations import Observation
from earl_core.system import fault_points
from tasks.reports.plan_report import plan_page
from tasks.reports.selector_metrics import load_metrics, selector_metrics

logger = logging.getLogger(__name__)


def collect_metrics(controller: RunController, manifests: dict[str, Manifest]) -> dict[str, float]:
    """All stages' metrics under `stage/name`, and what moved between the stages."""
    metrics = _stage_metrics(manifests)
    moved = [len(json.dumps(m.model_dump(mode="json"))) for m in manifests.values()]
    metrics["dispatch/manifest_bytes"] = float(sum(moved))
    metrics["dispatch/tensor_bytes"] = float(sum(m.tensor_bytes for m in manifests.values()))
    metrics["dispatch/shared_memory_bytes"] = float(controller.run.stores.used_bytes())
    metrics["recovery/stages_repeated"] = float(controller.losses[manifests["select"].iteration])
    if controller.run.spill is not None:
        # How much a crash of the machine would cost right now.
        metrics["dispatch/spill_lag_bytes"] = float(controller.run.spill.lag_bytes)
        metrics["dispatch/spilled_bytes"] = float(controller.run.spill.spilled_bytes)
    return metrics | _choice_metrics(controller, manifests)


def _stage_metrics(manifests: dict[str, Manifest]) -> dict[str, float]:
    return {
        f"{stage}/{name}": value
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
    return {
        **selector_metrics(plan, before, manifests, seen, controller.hardware.gpus),
        **load_metrics(manifests["rollout"].metrics, contexts),
    }


def _seen(controller: RunController, iteration: int) -> list[Observation]:
    return [seen for seen in controller.observed.through() if seen.iteration == iteration]


def finish_iteration(
    controller: RunController, iteration: int, manifests: dict[str, Manifest]
) -> None:
    """Write the iteration's metrics, declare its checkpoint STABLE, wake the tracker."""
    metrics = collect_metrics(controller, manifests)
    run = controller.run
    # Its shards go with STABLE.
    controller.episodes.settle()
    run.append_metrics(iteration, metrics)
    fault_points.point("stable.before", iteration)
    if is_updated(run, iteration):
        run.mark_stable(iteration)
        fault_points.point("stable.after", iteration)
        run.prune_checkpoints()
    controller.finish_iteration(iteration)
    controller.tracker.changed()
    controller.listener("iteration", iteration, {"finished": True, "metrics": metrics})


async def publish_artifacts(
    controller: RunController, iteration: int, manifests: dict[str, Manifest]
) -> None:
    """The plan and what it was chosen among, the curve and a sample episode, in Prefect's UI.

    manifests: up to the update's. What the stages took is observed first.
    """
    plan = DeploymentPlan.model_validate(manifests["select"].outputs["plan"])
    name = controller.config.name.lower().replace("_", "-").replace(".", "-")
    await asyncio.to_thread(observe, controller, manifests)
    before, seen = controller.run.plan(iteration - 1), _seen(controller, iteration)
    page = await asyncio.to_thread(plan_page, controller.run, plan, before, seen)
    kept = await asyncio.to_thread(_sample_episode, controller, iteration)
    last = {"iteration": iteration, **_stage_metrics(manifests)}
    await asyncio.gather(
        acreate_markdown_artifact(
            redact(page), key=f"{name}-plan", description=f"Plan of {iteration}"
        ),
        acreate_markdown_artifact(_curve(controller, last), key=f"{name}-curve"),
        *(
            acreate_markdown_artifact(redact(_transcript(episode)), key=f"{name}-episode")
            for episode in kept
        ),
    )


def _sample_episode(controller: RunController, iteration: int) -> list[dict[str, Any]]:
    controller.episodes.settle()
    try:
        return read_episodes(controller.run.episodes_path(iteration), 1)
    except EpisodesDamaged as error:
        logger.warning("no episode is shown: %s", error)
        return []


def _curve(controller: RunController, last: dict[str, Any]) -> str:
    before = [line for line in controller.run.metrics() if line["iteration"] < last["iteration"]]
    lines = ["| iteration | return | episodes | tokens/s | seconds |", "|--:|--:|--:|--:|--:|"]
    for row in [*before, last][-50:]:
        seconds = sum(value for name, value in row.items() if name.endswith("/stage_seconds"))
        lines.append(
            f"| {row['iteration']} | {row.get('reward/mean', float('nan')):.3f} "
            f"| {row.get('rollout/episodes', 0):.0f} "
            f"| {row.get('rollout/tokens_per_second', 0):.0f} | {seconds:.1f} |"
        )
    return "\n".join(lines)


def _transcript(episode: dict[str, Any]) -> str:
    parts = [f"Episode {episode['episode_id']}: {episode['outcome']}"]
    for turn in episode["turns"]:
        parts.append(f"**environment**\n\n```\n{turn['observation']}\n```")
        parts.append(f"**agent** (reward {turn['reward']})\n\n```\n{turn['answer']}\n```")
    return "\n\n".join(parts)
