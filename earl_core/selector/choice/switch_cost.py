"""What a change of layout costs: nothing, live ranks that exchange their state, new processes."""

from __future__ import annotations

from typing import Literal

from earl_core.selector.choice.selection import SelectionInput
from earl_core.selector.model.candidates import Candidate
from earl_core.selector.model.roofline import Roofline

Move = Literal["none", "settings", "relayout", "rebuild"]
"""`settings`: live ranks take other limits and move nothing. `relayout`: live ranks exchange their
slices. `rebuild`: the processes end and others start."""

_STATE_BYTES = 16.0
"""Of a parameter in training: weight, gradient and both moments, in float32."""


def move_between(before: Candidate, after: Candidate) -> Move:
    """What leads from one layout of a stage to another of the same stage."""
    if before == after:
        return "none"
    if before.stage != "update" or before.ranks != after.ranks:
        return "rebuild"
    return "settings" if _mesh(before) == _mesh(after) else "relayout"


def switch_seconds(
    given: SelectionInput, roofline: Roofline, before: Candidate, after: Candidate
) -> float:
    """Seconds of the move, as last measured; else a rebuild costs what is configured, and a
    relayout the time in which the state goes over the links once."""
    move, known = move_between(before, after), given.statistics
    if move == "rebuild":
        return known.switch_seconds.get(after.stage, given.selector.switch_seconds)
    if move != "relayout":
        return 0.0
    moved = _STATE_BYTES * roofline.shape.parameters / after.ranks
    measured = known.relayout_seconds.get(after.stage)
    return moved / roofline.group_bandwidth(after.ranks) if measured is None else measured


def _mesh(layout: Candidate) -> tuple[int | bool, ...]:
    return layout.replicas, layout.shard, layout.context, layout.tensor, layout.offload
