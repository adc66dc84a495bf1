"""What two sealed stages say of their data, whichever runs they are of.

A stage's key covers the run's uid, so that seals of two runs never have one digest. Compared are
the rows, their lengths, the checksums of shards and the digests among the outputs. A checksum
covers a shard's layout: where rows were divided among shards otherwise, checksums say nothing, and
only lengths and the rows themselves do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from earl_core.comparison.settings import differing
from earl_core.deployment.plan import DeploymentPlan
from earl_core.deployment.stages import STAGES
from earl_core.dispatch.shards.manifest import Manifest, ShardEntry
from earl_core.experience.alike_groups import TRAINED_EPISODES
from earl_core.imitation.content import CONTENT

Verdict = Literal["equal", "other", "untold"]

_OUTPUTS = ("digest", "made", "prompts", "groups", "cursor", "versions", TRAINED_EPISODES, CONTENT)
"""Outputs that are data. The others are measured, or name places."""

_MEASURED = ("seconds", "bytes", "per_second", "memory", "load/", "environment_share", "imbalance")
"""Parts of the names of metrics that no two executions share."""


class SealComparison(NamedTuple):
    """verdict: untold where rows lie otherwise and nothing else differs. texts: what differs."""

    verdict: Verdict
    texts: list[str]


def compare_seals(one: Manifest, other: Manifest) -> SealComparison:
    """Compare the outputs of the same stage of two runs; of a `select`, the plans."""
    if one.stage == "select":
        texts = plan_changes(plan_of(one), plan_of(other))
        return SealComparison("other" if texts else "equal", texts)
    sides = [{name: each.outputs.get(name) for name in _OUTPUTS} for each in (one, other)]
    texts = [f"{name}: {a} → {b}" for name, (a, b) in differing(sides).items()]
    if one.policy_version != other.policy_version:
        texts.append(f"policy version: {one.policy_version} → {other.policy_version}")
    rows, laid_out = _compare_shards(one, other)
    if texts or rows:
        return SealComparison("other", [*texts, *rows])
    return SealComparison("equal" if not laid_out else "untold", laid_out)


def _compare_shards(one: Manifest, other: Manifest) -> tuple[list[str], list[str]]:
    """What of the rows is known to differ, and how they lie otherwise."""
    found = _lengths_differ(one, other)
    shards = [{entry.row_ids: entry for entry in each.shards} for each in (one, other)]
    if shards[0].keys() != shards[1].keys():
        counts = [len(each) for each in shards]
        how = "" if counts[0] == counts[1] else f": {counts[0]} → {counts[1]} shards"
        return found, [f"rows are divided among shards otherwise{how}"]
    for number, (rows, entry) in enumerate(shards[0].items()):
        against = shards[1][rows]
        names = [sorted(each.columns) for each in (entry, against)]
        if names[0] != names[1]:
            odd = sorted({*names[0]} ^ {*names[1]})
            found.append(f"columns of one of them only: {', '.join(odd)}")
            break
        if entry.checksum != against.checksum:
            found.append(
                f"checksum of shard {number} ({len(rows)} rows): {entry.checksum} → "
                f"{against.checksum}"
            )
    return found, []


def _lengths_differ(one: Manifest, other: Manifest) -> list[str]:
    """The first row whose lengths differ: these are in the seals, whatever became of the rows."""
    sides = [dict(_row_lengths(each.shards)) for each in (one, other)]
    lone = [len(side.keys() - against.keys()) for side, against in (sides, sides[::-1])]
    found = [f"rows that the other has not: {lone[0]} and {lone[1]}"] if any(lone) else []
    shared = sorted(sides[0].keys() & sides[1].keys())
    differ = [row for row in shared if sides[0][row] != sides[1][row]]
    if differ:
        row = differ[0]
        changes = differing([sides[0][row], sides[1][row]])
        told = ", ".join(f"{axis} {a} → {b}" for axis, (a, b) in changes.items())
        found.append(f"lengths of {len(differ)} rows, the first of sample {row}: {told}")
    return found


def _row_lengths(shards: tuple[ShardEntry, ...]) -> list[tuple[int, Mapping[str, int]]]:
    return [
        (row, {axis: lengths[number] for axis, lengths in entry.axes.items()})
        for entry in shards
        for number, row in enumerate(entry.row_ids)
    ]


def plan_of(sealed: Manifest) -> DeploymentPlan | None:
    """The plan in a seal of `select`; None for one that cannot be read."""
    try:
        return DeploymentPlan.model_validate(sealed.outputs["plan"])
    except (KeyError, ValidationError):
        return None


def plan_changes(one: DeploymentPlan | None, other: DeploymentPlan | None) -> list[str]:
    """Where two plans lay stages out otherwise. What they predict is measured, and no plan."""
    if one is None or other is None:
        return [] if one is other else ["only one of the plans can be read"]
    sides = [
        {
            **{stage: deployment._asdict() for stage, deployment in plan.stages.items()},
            "devices": plan.division.model_dump(mode="json") if plan.division else None,
        }
        for plan in (one, other)
    ]
    return [_change(name, *values) for name, values in differing(sides).items()]


def _change(name: str, one: Any, other: Any) -> str:
    stage, _, field = name.partition(".")
    return f"{stage}{' ' if field else ''}{field.replace('_', ' ')}: {one} → {other}"


def layout_changes(
    stage: str, sealed: tuple[Manifest, Manifest], plans: tuple[DeploymentPlan | None, ...]
) -> list[str]:
    """Where a stage's work was laid out otherwise: as it was done, else as it was planned."""
    done: list[Any] = [each.outputs.get("deployment") for each in sealed]
    if None in done:
        role = STAGES[stage].role if stage in STAGES else ""
        planned = [plan.stages.get(role) if plan else None for plan in plans]
        done = [each._asdict() if each else {} for each in planned]
    return [_change(f"{stage}.{name}", *both) for name, both in differing(done).items()]


def metric_changes(one: Manifest, other: Manifest, most: int = 8) -> dict[str, tuple[float, float]]:
    """The first metrics of a stage that differ, but those that no two executions share."""
    found = {
        name: (value, other.metrics[name])
        for name, value in one.metrics.items()
        if name in other.metrics
        and value != other.metrics[name]
        and not any(part in name for part in _MEASURED)
    }
    return dict(list(found.items())[:most])
