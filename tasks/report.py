"""What a finished iteration leaves for people: metrics, artifacts in Prefect, the tracker."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from prefect.artifacts import acreate_markdown_artifact

from earl_core.control.finished_stages import holds_update
from earl_core.control.run_controller import Session
from earl_core.dispatch import Manifest
from earl_core.run.keys import STAGES
from earl_core.secrets import redact
from earl_core.selector import DeploymentPlan
from earl_core.selector.profile.observations import Observation
from earl_core.system import fault_points
from tasks.reports.plan import plan_page
from tasks.reports.selector_metrics import load_metrics, selector_metrics


def collect_metrics(session: Session, manifests: dict[str, Manifest]) -> dict[str, float]:
    """All stages' metrics under `stage/name`, and what moved between the stages."""
    metrics: dict[str, float] = {}
    for stage in STAGES:
        if stage in manifests:
            found = manifests[stage].metrics.items()
            metrics.update({f"{stage}/{name}": value for name, value in found})
    moved = [len(json.dumps(m.model_dump(mode="json"))) for m in manifests.values()]
    metrics["dispatch/manifest_bytes"] = float(sum(moved))
    metrics["dispatch/tensor_bytes"] = float(sum(m.tensor_bytes for m in manifests.values()))
    metrics["dispatch/shared_memory_bytes"] = float(session.run.store.used_bytes())
    metrics["recovery/stages_repeated"] = float(session.losses[manifests["select"].iteration])
    if session.run.spill is not None:
        # How much a crash of the machine would cost right now.
        metrics["dispatch/spill_lag_bytes"] = float(session.run.spill.lag_bytes)
        metrics["dispatch/spilled_bytes"] = float(session.run.spill.spilled_bytes)
    return metrics | _choice_metrics(session, manifests)


def _choice_metrics(session: Session, manifests: dict[str, Manifest]) -> dict[str, float]:
    plan = _plan(manifests["select"])
    before = plan_before(session, plan.iteration)
    seen = _seen(session, plan.iteration)
    lines = [line for line in session.run.metrics() if line["iteration"] < plan.iteration]
    name = "rollout/context/mean"
    contexts = [float(line[name]) for line in lines if name in line]
    return {
        **selector_metrics(plan, before, manifests, seen, session.hardware.gpus),
        **load_metrics(manifests["rollout"].metrics, contexts),
    }


def _seen(session: Session, iteration: int) -> list[Observation]:
    return [seen for seen in session.observed.all() if seen.iteration == iteration]


def plan_before(session: Session, iteration: int) -> DeploymentPlan | None:
    """The plan of the iteration before, if there was one."""
    if iteration == 0 or not session.run.stage_path(iteration - 1, "select").exists():
        return None
    return _plan(session.run.manifest(iteration - 1, "select"))


def _plan(manifest: Manifest) -> DeploymentPlan:
    return DeploymentPlan.model_validate(manifest.outputs["plan"])


def finish_iteration(session: Session, iteration: int, manifests: dict[str, Manifest]) -> None:
    """Write the iteration's metrics, declare its checkpoint STABLE, feed the tracker."""
    metrics = collect_metrics(session, manifests)
    run = session.run
    run.append_metrics(iteration, metrics)
    fault_points.point("stable.before", iteration)
    whole = holds_update(session, manifests["update"])
    if whole:
        run.mark_stable(iteration)
        fault_points.point("stable.after", iteration)
        run.prune_checkpoints(keep=best_checkpoint(session))
    session.finish_iteration(iteration)
    session.tracker.iteration_finished(
        iteration,
        metrics,
        plan=manifests["select"].outputs["plan"],
        examples=manifests["rollout"].outputs.get("examples", []),
        checkpoint=run.checkpoint_path(iteration) if whole else None,
    )
    session.listener("iteration", iteration, {"finished": True, "metrics": metrics})


def best_checkpoint(session: Session) -> set[int]:
    """The iteration whose checkpoint was evaluated best, so that pruning keeps it."""
    scored = []
    for version, metrics in evaluations(session):
        if version > 0 and (session.run.checkpoint_path(version - 1) / "STABLE").exists():
            scored.append((metrics.get("return/mean", float("-inf")), version - 1))
    return {max(scored)[1]} if scored else set()


def evaluations(session: Session) -> list[tuple[int, dict[str, float]]]:
    """Every sealed evaluation of the run: (policy version, metrics), ascending."""
    found = []
    for path in sorted((session.run.path / "iterations").glob("*/evaluation.json")):
        version = int(path.parent.name)
        found.append((version, session.run.manifest(version, "evaluation").metrics))
    return found


async def publish_artifacts(
    session: Session, iteration: int, manifests: dict[str, Manifest]
) -> None:
    """The plan and what it was chosen among, the curve and a sample episode, in Prefect's UI."""
    plan = _plan(manifests["select"])
    name = session.config.name.lower().replace("_", "-").replace(".", "-")
    before, seen = plan_before(session, iteration), _seen(session, iteration)
    page = await asyncio.to_thread(plan_page, session.run, plan, before, seen)
    examples = manifests["rollout"].outputs.get("examples", [])
    await asyncio.gather(
        acreate_markdown_artifact(
            redact(page), key=f"{name}-plan", description=f"Plan of {iteration}"
        ),
        acreate_markdown_artifact(_curve(session), key=f"{name}-curve"),
        *(
            acreate_markdown_artifact(redact(_transcript(example)), key=f"{name}-episode")
            for example in examples[:1]
        ),
    )


def _curve(session: Session) -> str:
    lines = ["| iteration | return | episodes | tokens/s | seconds |", "|--:|--:|--:|--:|--:|"]
    for row in session.run.metrics()[-50:]:
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
