"""What a finished iteration leaves for people: metrics, artifacts in Prefect, the tracker."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from prefect.artifacts import acreate_markdown_artifact

from earl_core.control.finished_stages import holds_update
from earl_core.control.run_controller import RunController
from earl_core.dispatch import Manifest
from earl_core.run.keys import STAGES
from earl_core.secrets import redact
from earl_core.selector import DeploymentPlan
from earl_core.selector.profile.observations import Observation
from earl_core.system import fault_points
from tasks.reports.plan_report import plan_page
from tasks.reports.selector_metrics import load_metrics, selector_metrics


def collect_metrics(controller: RunController, manifests: dict[str, Manifest]) -> dict[str, float]:
    """All stages' metrics under `stage/name`, and what moved between the stages."""
    metrics: dict[str, float] = {}
    for stage in STAGES:
        if stage in manifests:
            found = manifests[stage].metrics.items()
            metrics.update({f"{stage}/{name}": value for name, value in found})
    moved = [len(json.dumps(m.model_dump(mode="json"))) for m in manifests.values()]
    metrics["dispatch/manifest_bytes"] = float(sum(moved))
    metrics["dispatch/tensor_bytes"] = float(sum(m.tensor_bytes for m in manifests.values()))
    metrics["dispatch/shared_memory_bytes"] = float(controller.run.store.used_bytes())
    metrics["recovery/stages_repeated"] = float(controller.losses[manifests["select"].iteration])
    if controller.run.spill is not None:
        # How much a crash of the machine would cost right now.
        metrics["dispatch/spill_lag_bytes"] = float(controller.run.spill.lag_bytes)
        metrics["dispatch/spilled_bytes"] = float(controller.run.spill.spilled_bytes)
    return metrics | _choice_metrics(controller, manifests)


def _choice_metrics(controller: RunController, manifests: dict[str, Manifest]) -> dict[str, float]:
    plan = _plan(manifests["select"])
    before = plan_before(controller, plan.iteration)
    seen = _seen(controller, plan.iteration)
    lines = [line for line in controller.run.metrics() if line["iteration"] < plan.iteration]
    name = "rollout/context/mean"
    contexts = [float(line[name]) for line in lines if name in line]
    return {
        **selector_metrics(plan, before, manifests, seen, controller.hardware.gpus),
        **load_metrics(manifests["rollout"].metrics, contexts),
    }


def _seen(controller: RunController, iteration: int) -> list[Observation]:
    return [seen for seen in controller.observed.all() if seen.iteration == iteration]


def plan_before(controller: RunController, iteration: int) -> DeploymentPlan | None:
    """The plan of the iteration before, if there was one."""
    if iteration == 0 or not controller.run.stage_path(iteration - 1, "select").exists():
        return None
    return _plan(controller.run.manifest(iteration - 1, "select"))


def _plan(manifest: Manifest) -> DeploymentPlan:
    return DeploymentPlan.model_validate(manifest.outputs["plan"])


def finish_iteration(
    controller: RunController, iteration: int, manifests: dict[str, Manifest]
) -> None:
    """Write the iteration's metrics, declare its checkpoint STABLE, feed the tracker."""
    metrics = collect_metrics(controller, manifests)
    run = controller.run
    run.append_metrics(iteration, metrics)
    fault_points.point("stable.before", iteration)
    whole = holds_update(controller, manifests["update"])
    if whole:
        run.mark_stable(iteration)
        fault_points.point("stable.after", iteration)
        run.prune_checkpoints(keep=best_checkpoint(controller))
    controller.finish_iteration(iteration)
    controller.tracker.iteration_finished(
        iteration,
        metrics,
        plan=manifests["select"].outputs["plan"],
        examples=manifests["rollout"].outputs.get("examples", []),
        checkpoint=run.checkpoint_path(iteration) if whole else None,
    )
    controller.listener("iteration", iteration, {"finished": True, "metrics": metrics})


def best_checkpoint(controller: RunController) -> set[int]:
    """The iteration whose checkpoint was evaluated best, so that pruning keeps it."""
    scored = []
    for version, metrics in evaluations(controller):
        if version > 0 and (controller.run.checkpoint_path(version - 1) / "STABLE").exists():
            scored.append((metrics.get("return/mean", float("-inf")), version - 1))
    return {max(scored)[1]} if scored else set()


def evaluations(controller: RunController) -> list[tuple[int, dict[str, float]]]:
    """Every sealed evaluation of the run: (policy version, metrics), ascending."""
    found = []
    for path in sorted((controller.run.path / "iterations").glob("*/evaluation.json")):
        version = int(path.parent.name)
        found.append((version, controller.run.manifest(version, "evaluation").metrics))
    return found


async def publish_artifacts(
    controller: RunController, iteration: int, manifests: dict[str, Manifest]
) -> None:
    """The plan and what it was chosen among, the curve and a sample episode, in Prefect's UI."""
    plan = _plan(manifests["select"])
    name = controller.config.name.lower().replace("_", "-").replace(".", "-")
    before, seen = plan_before(controller, iteration), _seen(controller, iteration)
    page = await asyncio.to_thread(plan_page, controller.run, plan, before, seen)
    examples = manifests["rollout"].outputs.get("examples", [])
    await asyncio.gather(
        acreate_markdown_artifact(
            redact(page), key=f"{name}-plan", description=f"Plan of {iteration}"
        ),
        acreate_markdown_artifact(_curve(controller), key=f"{name}-curve"),
        *(
            acreate_markdown_artifact(redact(_transcript(example)), key=f"{name}-episode")
            for example in examples[:1]
        ),
    )


def _curve(controller: RunController) -> str:
    lines = ["| iteration | return | episodes | tokens/s | seconds |", "|--:|--:|--:|--:|--:|"]
    for row in controller.run.metrics()[-50:]:
        seconds = sum(value for name, value in row.items() if name.endswith("/stage_seconds"))
        lines.append(
            f"| {row['iteration']} | {row.get('reward/mean', float('nan')):.3f} "
            f"| {row.get('rollout/episodes', 0):.0f} "
            f"| {row.get('rollout/tokens_per_second', 0):.0f} | {seconds:.1f} |"
        )
    return "\n".join(lines)


def _transcript(example: dict[str, Any]) -> str:
    parts = [f"Episode {example.get('episode_id')}: {example.get('outcome', '')}"]
    for turn in example.get("turns", []):
        parts.append(f"**environment**\n\n```\n{turn.get('observation', '')}\n```")
        parts.append(
            f"**agent** (reward {turn.get('reward')})\n\n```\n{turn.get('answer', '')}\n```"
        )
    return "\n\n".join(parts)
