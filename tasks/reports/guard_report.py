"""What the guard has found in a run, for people."""

from __future__ import annotations

from collections.abc import Mapping

from earl_core.guard.decision import Decision
from earl_core.secrets.rules import Redaction
from earl_core.system.plural import plural
from tasks.reports.plan_report import markdown_table

_SHOWN = 50
"""Findings on the page: the newest."""


def guard_page(decisions: Mapping[int, Decision], redaction: Redaction) -> str:
    """Markdown. decisions: those with a finding, by iteration. redaction: what ids of episodes
    pass."""
    rows = []
    for iteration, decision in sorted(decisions.items(), reverse=True):
        for each in decision.findings:
            rows.append(
                {
                    "iteration": str(iteration),
                    "finding": each.kind,
                    "since": str(each.onset),
                    "evidence": each.text,
                    "episodes": redaction.shown_ids(each.episodes[:5]),
                    "what was done": done(decision),
                }
            )
    return "\n\n".join(["## What the guard found", markdown_table(rows[:_SHOWN])])


def done(decision: Decision) -> str:
    """What followed from an iteration's findings."""
    parts = []
    if decision.quarantined:
        parts.append(f"{plural(len(decision.quarantined), 'episode')} left out")
    if decision.caution:
        parts.append("cautious")
    if decision.back_to is not None:
        parts.append(f"back to iteration {decision.back_to}")
    if decision.stop:
        parts.append("stopped")
    return ", ".join(parts) or "told"


def newest_finding(decisions: Mapping[int, Decision]) -> str:
    """The newest finding as one line; empty: nothing was found."""
    if not decisions:
        return ""
    iteration = max(decisions)
    decision = decisions[iteration]
    kinds = "; ".join(f"{e.kind} since iteration {e.onset}: {e.text}" for e in decision.findings)
    return f"iteration {iteration}: {kinds} ({done(decision)})"
