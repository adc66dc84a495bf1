"""The evaluation stage: held-out episodes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from earl_core.control.device_moves import engines_of
from earl_core.control.replicas import play_evaluation
from earl_core.control.stage_execution import StageWatch
from tasks.publish import input_weights
from tasks.stage import StageInputs, stage_task


@stage_task
def evaluation(given: StageInputs) -> dict[str, Any]:
    """Play prompts and seeds that training never uses."""
    controller, iteration, plan = given.controller, given.iteration, given.plan
    weights = input_weights(controller, plan["update"], iteration, "evaluation")
    engines = engines_of(controller, plan)
    own = engines == plan["rollout"]
    # Another choice for this iteration would not change the engines of a later plan.
    with StageWatch(controller, engines, iteration).fitting() if own else nullcontext():
        result = play_evaluation(controller, engines, iteration, weights)
    shares = {
        f"outcome/{name}/{part}": float(value)
        for name, parts in result["outcomes"].items()
        for part, value in parts.items()
    }
    return {
        "outputs": {"outcomes": result["outcomes"], "suites": result["suites"]},
        "metrics": {**_without_outcomes(result["metrics"]), **shares},
    }


def _without_outcomes(metrics: dict[str, float]) -> dict[str, float]:
    """`outcome/NAME` is `outcome/NAME/share`, which comes with its interval."""
    return {name: value for name, value in metrics.items() if not name.startswith("outcome/")}
