"""What another stage deployment costs: nothing, a reshard among live ranks, or new processes."""

from __future__ import annotations

from typing import Literal

from earl_core.cluster.stage_deployment import StageDeployment
from earl_core.selector.choice.predict import Predictor

Move = Literal["none", "settings", "reshard", "rebuild"]
"""`settings`: live ranks take other limits and move nothing. `reshard`: live ranks exchange their
slices. `rebuild`: the processes end and others start."""

_STATE_BYTES = 16.0
"""Of a parameter in training: weight, gradient and both moments, in float32."""


def move_between(before: StageDeployment, after: StageDeployment) -> Move:
    """What leads from one stage deployment to another of the same stage."""
    if before == after:
        return "none"
    if before.stage != "update" or before.ranks != after.ranks:
        return "rebuild"
    same = before.axes == after.axes and before.offload_optimizer == after.offload_optimizer
    return "settings" if same else "reshard"


def switch_seconds(predictor: Predictor, before: StageDeployment, after: StageDeployment) -> float:
    """Seconds of the move, as last measured; else a rebuild costs what is configured, and a
    reshard the time in which the state goes over the links once."""
    move, known = move_between(before, after), predictor.given.statistics
    if move == "rebuild":
        return known.switch_seconds.get(after.stage, predictor.given.selector.switch_seconds)
    if move != "reshard":
        return 0.0
    moved = _STATE_BYTES * predictor.shape.parameters / after.ranks
    guess = moved / predictor.roofline.group_bandwidth(after.ranks)
    return known.reshard_seconds.get(after.stage, guess)
