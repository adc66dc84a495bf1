"""The plan of an iteration as a page: what was chosen, what else there was, what was ruled out."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from earl_core.deployment.plan import DeploymentPlan
from earl_core.run import RunDirectory
from earl_core.selector.choice.changes import infeasible_text, stage_changes
from earl_core.selector.choice.explain import (
    Row,
    candidate_rows,
    considered,
    plan_rows,
    refused_rows,
)
from earl_core.selector.choice.prediction import NoFeasiblePlan
from earl_core.selector.choice.selection import SelectionInput
from earl_core.selector.profile.observations import INFEASIBLE, Observation
from earl_core.system.files import read_file

_ROWS_SHOWN = 24
_GUESSED = "≈"


def plan_page(
    run: RunDirectory,
    plan: DeploymentPlan,
    before: DeploymentPlan | None,
    seen: Sequence[Observation],
) -> str:
    """Markdown. before: the last iteration's plan. seen: what the run observed in this one."""
    parts = [
        f"## Plan of iteration {plan.iteration}, policy {plan.policy}",
        *_history(plan, before, seen),
        *_chosen(plan),
        *_considered(run, plan),
    ]
    return "\n\n".join(parts)


def _chosen(plan: DeploymentPlan) -> list[str]:
    """A narrow table, because the page has 780 pixels and wraps no cell; sentences below it."""
    rows = plan_rows(plan)
    names = ("stage", "stage deployment", "seconds", "memory")
    told = []
    for row in rows:
        known = row.get("known from")
        numbers = f"predicted {row['tokens/s']} tokens/s, from {known}" if known else ""
        text = "; ".join(part for part in (row["why"], numbers) if part)
        if text:
            told.append(f"- **{row['stage']}**: {_plain(text)}")
    narrow = [{name: row.get(name, "") for name in names} for row in rows]
    return [markdown_table(narrow), *(["\n".join(told)] if told else [])]


def _history(
    plan: DeploymentPlan, before: DeploymentPlan | None, seen: Sequence[Observation]
) -> list[str]:
    lines = [f"- {change.text}" for change in stage_changes(before, plan)]
    lines += [f"- {infeasible_text(item)}" for item in seen if item.kind in INFEASIBLE]
    if plan.attempt:
        lines.append(f"- chosen {plan.attempt + 1} times, because a stage was infeasible")
    return ["\n".join(lines)] if lines else []


def _considered(run: RunDirectory, plan: DeploymentPlan) -> list[str]:
    """List the candidates of the sealed input; a sentence where that cannot be said."""
    source = run.stage_path(plan.iteration, "selection").with_suffix(".input")
    try:
        given = SelectionInput.model_validate_json(read_file(source))
        tables = candidate_tables(given, plan)
    except (OSError, ValidationError) as error:
        return [f"What was considered cannot be shown: {error}"]
    except (NoFeasiblePlan, ValueError) as error:
        return [f"Nothing else was considered: {error}"]
    parts = []
    for heading, rows in tables:
        shown = rows[:_ROWS_SHOWN]
        parts.append(f"### {heading}")
        offered = [_narrow(row) for row in shown if "seconds" in row]
        if offered:
            parts.append(markdown_table(offered))
        told = [text for row in shown if (text := _remark(row))]
        if len(rows) > _ROWS_SHOWN:
            told.append(f"- … and {len(rows) - _ROWS_SHOWN} more")
        if told:
            parts.append("\n".join(told))
    return [*parts, f"{_GUESSED}: a guess by the roofline, not measured"]


def _narrow(row: Row) -> Row:
    guessed = row["seconds"] and row["known from"] == "roofline"
    return {
        "candidate": row["candidate"],
        "seconds": f"{_GUESSED} {row['seconds']}" if guessed else row["seconds"],
        "difference": row["against the chosen"],
        "memory": row["memory"],
        "KV cache": row["KV cache filled"],
    }


def _remark(row: Row) -> str:
    """Put a row into words: of a candidate its verdict, else why it was not offered."""
    if "reason" in row:
        return f"- **{row['stage']}**, {_plain(row['candidates'])}: {_plain(row['reason'])}"
    return f"- {_plain(row['candidate'])}: {_plain(row['verdict'])}" if row["verdict"] else ""


def candidate_tables(given: SelectionInput, plan: DeploymentPlan) -> list[tuple[str, list[Row]]]:
    """The candidates of each stage, and what was not offered: tables with their headings. Raises as
    `considered`."""
    choice = considered(given, plan)
    tables = [
        (f"{stage}: {len(offered)} candidates, best first", candidate_rows(choice, stage))
        for stage, offered in choice.predictions.items()
    ]
    refused = refused_rows(choice)
    return [*tables, ("Not offered", refused)] if refused else tables


def markdown_table(rows: Sequence[Row]) -> str:
    """Rows as a table of all columns in which any of them has something."""
    named = dict.fromkeys(name for row in rows for name in row)
    columns = [name for name in named if any(row.get(name) for row in rows)]
    lines = [columns, ["---"] * len(columns)]
    lines += [[_cell(row.get(name, "")) for name in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")


def _plain(text: str) -> str:
    """Text in one line that opens no HTML."""
    return text.replace("\n", " ").replace("<", "&lt;")
