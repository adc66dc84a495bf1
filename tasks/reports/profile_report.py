"""Results of a profile, for people: rows of tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from earl_core.selector.choice.explain import Row, summary
from earl_core.selector.choice.prediction import NoFeasiblePlan
from earl_core.selector.choice.selection import SelectionInput
from earl_core.selector.held_out import HeldOutError, held_out_errors
from earl_core.selector.model.memory_model import gib
from earl_core.selector.profile.profile_table import ProfilePoint, ProfileTable, candidate_of_key
from earl_core.selector.profile_planner import at_context

_CONTEXTS = tuple(1024 * 2**power for power in range(6))


def measured_rows(given: SelectionInput, table: ProfileTable) -> list[Row]:
    """Every measured candidate under every load, slowest changing first: stage, candidate, load."""
    return [_row(given, point) for point in sorted(table.points, key=_order)]


def _order(point: ProfilePoint) -> tuple[str, str, float, float]:
    return point.key.split()[0], point.key, point.context, point.requests


def _row(given: SelectionInput, point: ProfilePoint) -> Row:
    candidate = candidate_of_key(point.key, given.hardware.devices)
    engines = ""
    if candidate.stage == "rollout":
        engines = f"{candidate.replicas * point.tokens_per_second:,.0f}"
    failed = point.out_of_memory
    return {
        "stage": candidate.stage,
        "candidate": candidate.label,
        "context": f"{point.context:,.0f}",
        "sequences": f"{point.requests:,.0f}",
        "live tokens": f"{point.live_tokens:,.0f}",
        "tokens/s": "" if failed else f"{point.tokens_per_second:,.0f}",
        "all engines": "" if failed else engines,
        "peak": gib(point.peak_bytes) if point.peak_bytes else "",
        "note": "out of memory" if failed else "",
    }


def choice_rows(given: SelectionInput, table: ProfileTable) -> list[Row]:
    """List the choices that `live_tokens` would make with this profile at contexts of 1K to 32K."""
    selector = given.selector.model_copy(update={"policy": "live_tokens"})
    asked = given.model_copy(update={"selector": selector})
    rows = []
    for context in (c for c in _CONTEXTS if c <= given.model.max_positions):
        try:
            rows.append(summary(at_context(asked, context, table)))
        except NoFeasiblePlan as error:
            rows.append({"context": f"{context:,}", "rollout": str(error)})
    return rows


def error_rows(errors: Sequence[HeldOutError]) -> list[Row]:
    """The memory model's held-out errors by stage."""
    return [
        {
            "stage": error.stage,
            "peaks": str(error.peaks),
            "median error": f"{100 * error.median:.1f} %",
            "worst": f"{100 * error.worst:.1f} %",
            "within 10 %": f"{100 * error.well:.0f} %",
            "formula alone": f"{100 * error.formula:.0f} %",
        }
        for error in errors
    ]


def report(given: SelectionInput, table: ProfileTable) -> dict[str, Any]:
    """All of it as plain data: `measured`, `choices`, `memory_errors` and `metrics`."""
    errors = held_out_errors(given, table)
    return {
        "measured": measured_rows(given, table),
        "choices": choice_rows(given, table),
        "memory_errors": error_rows(errors),
        "metrics": _metrics(table, errors),
    }


def _metrics(table: ProfileTable, errors: Sequence[HeldOutError]) -> dict[str, float]:
    metrics = {
        "profile/points": float(len(table.points)),
        "profile/out_of_memory": float(sum(point.out_of_memory for point in table.points)),
        "profile/seconds": table.seconds,
    }
    for error in errors:
        for name in ("median", "worst", "well", "formula"):
            metrics[f"profile/{error.stage}/memory_error/{name}"] = getattr(error, name)
    return metrics
