"""What the events of a flow say to people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flows.cli.tables import signed

Event = Mapping[str, Any]

_PREPARATIONS = {
    "starting": "starting the {} worker",
    "resharding": "resharding the {}",
    "downloading": "downloading the model {} from the model hub",
    "building": "building the model {}",
}


def preparation(event: Event) -> str:
    """What an event says about workers or a model that a stage waits for; empty: nothing."""
    return next((form.format(event[k]) for k, form in _PREPARATIONS.items() if k in event), "")


def switch_line(iteration: int, event: Event) -> str:
    """A line about a stage that takes another stage deployment, or is repeated; empty: the event
    says nothing of the kind."""
    told = event.get("switched") or event.get("repeated")
    return f"iteration {iteration}: {told}" if told else ""


def counted(event: Event) -> tuple[float, float, str]:
    """How many are done of how many, and of what: `episodes` or `samples`; (0, 0, "") where an
    event does not count."""
    for unit in ("episodes", "samples"):
        if f"{unit}_done" in event:
            return event[f"{unit}_done"], event.get(unit, 0.0), unit
    return 0.0, 0.0, ""


def numbers_text(event: Event) -> str:
    """The numbers of an event, such as `12/64 episodes, 840 tokens/s, return +0.30`."""
    done, total, unit = counted(event)
    parts = [f"{done:.0f}/{total:.0f} {unit}"] if total else []
    if event.get("tokens_per_second"):
        parts.append(f"{event['tokens_per_second']:,.0f} tokens/s")
    if "return" in event:
        parts.append(f"return {signed(event['return'], 2)}")
    return ", ".join(parts)
