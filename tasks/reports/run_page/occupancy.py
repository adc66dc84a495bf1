"""Engines and ranks over time, by the ledger of the newest attempt, and who waited for whom."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from earl_core.deployment.plan import DeploymentPlan
from earl_core.deployment.stages import EVALUATION, PLAYED, STAGES, stage_of
from tasks.reports.run_page.records import Line

MOST_ITERATIONS = 60
"""The last ones are shown: spans of more are too narrow to see."""
_MOST_SPANS = 2000
_LEAST_WAIT = 0.05
"""Seconds; what is shorter is the flow's own time."""
_PLAYED = re.compile(r"engine (\d+) played .* in ([\d.]+) s")
_ROLES = {
    "experience": "rewards",
    "reference": "reference",
    "demonstrations": "demonstrations",
    "critic": "critic",
}


@dataclass(frozen=True)
class Busy:
    """What an engine or ranks did. begin, end: Unix time in seconds."""

    lane: str
    stage: str
    iteration: int
    begin: float
    end: float

    @property
    def what(self) -> str:
        """For people."""
        if self.stage == EVALUATION.name:
            return f"evaluation of version {self.iteration}"
        return f"{self.stage} {self.iteration}"


@dataclass(frozen=True)
class Wait:
    """Time between two things that an engine or ranks did. cause: what took the longest part of it,
    of what had ended before the second."""

    lane: str
    begin: float
    end: float
    cause: Busy | None

    @property
    def why(self) -> str:
        """For people."""
        if self.cause is None:
            return "waits"
        return f"waits for {self.cause.what} on {self.cause.lane}"


def occupancy(ledger: Sequence[Line], plans: Sequence[DeploymentPlan]) -> dict[str, Any]:
    """`spans`, for each its `lane`, `begin` and `length` in seconds from the first, `stage` (empty:
    a wait) and `text`; and `waits`: `lane`, `cause`, `seconds`, `share` of the time shown."""
    busy = sorted(_busy(ledger, plans), key=lambda each: (each.begin, each.end))[-_MOST_SPANS:]
    if not busy:
        return {"spans": [], "waits": []}
    first, last = busy[0].begin, max(each.end for each in busy)
    waits = list(_waits(busy))
    lanes = sorted(dict.fromkeys(each.lane for each in busy), key=_order)
    spans = [
        _span(each.lane, each.begin - first, each.end - each.begin, each.stage, each.what)
        for each in busy
    ]
    spans += [
        _span(each.lane, each.begin - first, each.end - each.begin, "", each.why) for each in waits
    ]
    totals: dict[tuple[str, str], float] = {}
    for each in waits:
        cause = "the flow, or a start" if each.cause is None else _kind(each.cause)
        totals[each.lane, cause] = totals.get((each.lane, cause), 0.0) + each.end - each.begin
    return {
        "spans": sorted(spans, key=lambda span: (lanes.index(span["lane"]), span["begin"])),
        "waits": [
            {"lane": lane, "cause": cause, "seconds": round(seconds, 1),
             "share": round(100 * seconds / max(last - first, 1e-9), 1)}
            for (lane, cause), seconds in sorted(totals.items(), key=lambda each: -each[1])
        ],
    }  # fmt: skip


def _span(lane: str, begin: float, length: float, stage: str, what: str) -> dict[str, Any]:
    text = f"{lane}: {what}, {length:.1f} s"
    return {
        "lane": lane, "begin": round(begin, 3), "length": round(length, 3),
        "stage": stage, "text": text,
    }  # fmt: skip


def _kind(busy: Busy) -> str:
    return f"{busy.stage} on {busy.lane}"


def _order(lane: str) -> tuple[int, str]:
    """Engines by their numbers, then ranks."""
    engine = re.fullmatch(r"engine (\d+)", lane)
    return (int(engine[1]), lane) if engine else (10**6, lane)


def _busy(ledger: Sequence[Line], plans: Sequence[DeploymentPlan]) -> Iterator[Busy]:
    newest = max((line.get("attempt", 0) for line in ledger), default=0)
    lines = [line for line in ledger if line.get("attempt") == newest]
    last = max((line["iteration"] for line in lines), default=0)
    ranks = {
        plan.iteration: plan.stages["update"].ranks for plan in plans if "update" in plan.stages
    }
    started: dict[tuple[int, str], float] = {}
    for line in lines:
        iteration, name = line["iteration"], line["stage"]
        stage, event, end = stage_of(name), line["event"], line["time"]
        if iteration <= last - MOST_ITERATIONS:
            continue
        if event == "started":
            started[iteration, name] = end
        elif found := _PLAYED.fullmatch(event):
            yield Busy(f"engine {found[1]}", stage, iteration, end - float(found[2]), end)
        elif (
            event == "sealed"
            and (iteration, name) in started
            and (lane := _lane(stage, ranks.get(iteration, 1)))
        ):
            yield Busy(lane, stage, iteration, started[iteration, name], end)


def _lane(stage: str, ranks: int) -> str:
    """Who does a stage; empty: engines, which are told of by themselves, or nobody."""
    if stage not in STAGES or (stage in PLAYED and stage != "collect"):
        return ""
    if stage == "collect":
        return "batches"
    role = STAGES[stage].role
    if role == "update":
        return "update rank" if ranks == 1 else f"{ranks} update ranks"
    return _ROLES.get(role, "")


def _waits(busy: Sequence[Busy]) -> Iterator[Wait]:
    """Gaps of each lane."""
    free: dict[str, float] = {}
    for each in busy:
        since = free.get(each.lane)
        if since is not None and each.begin - since >= _LEAST_WAIT:
            parts = [
                (min(other.end, each.begin) - max(other.begin, since), other.end, other)
                for other in busy
                if other.lane != each.lane and since < other.end <= each.begin + _LEAST_WAIT
            ]
            longest = max(parts, key=lambda part: part[:2], default=None)
            yield Wait(each.lane, since, each.begin, longest and longest[2])
        free[each.lane] = max(each.end, since or 0.0)
