"""Held-out evaluation of one policy version, as a step of `train`."""

from __future__ import annotations

from typing import Any

from prefect import task

from earl_core.control.observation import StageWatch
from earl_core.control.replicas import play_evaluation
from earl_core.control.run_controller import controller_of
from tasks.publish import input_weights
from tasks.select import plan_of
from tasks.stage import StageRef, run_stage


@task(name="evaluation")
def evaluation(run: str, version: int, plan: StageRef) -> StageRef:
    """Play prompts and seeds that training never uses with policy version `version`."""
    controller = controller_of(run)
    chosen = plan_of(controller, plan)
    weights = input_weights(controller, chosen["update"], version)

    def body() -> dict[str, Any]:
        with StageWatch(controller, chosen["rollout"], version).fitting():
            result = play_evaluation(controller, chosen["rollout"], version, weights)
        return {
            "outputs": {"outcomes": result["outcomes"]},
            "metrics": {**result["metrics"], **_flat(result["outcomes"])},
        }

    return run_stage(controller, version, "evaluation", body)


def _flat(outcomes: dict[str, dict[str, float]]) -> dict[str, float]:
    return {
        f"outcome/{name}/{part}": float(value)
        for name, parts in outcomes.items()
        for part, value in parts.items()
    }
