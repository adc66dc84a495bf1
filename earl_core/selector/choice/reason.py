"""Why a plan lays a stage out as it does, in one sentence."""

from __future__ import annotations

import math

from earl_core.selector.choice.predict import Prediction, Predictor
from earl_core.selector.choice.selection import SelectionInput
from earl_core.selector.choice.switch_cost import switch_seconds
from earl_core.selector.model.candidates import Candidate


def reason_of(
    given: SelectionInput,
    predictor: Predictor,
    found: dict[str, list[Prediction]],
    current: dict[str, Prediction],
    row: Prediction,
) -> str:
    """Why the stage has this layout, in one sentence with its figures."""
    stage = row.candidate.stage
    old = current.get(stage)
    guess = " (a guess: not measured)" if row.guess else ""
    if old is None or old.candidate == row.candidate:
        return _kept(predictor, found[stage], row, old is not None) + guess
    move = _move(old.candidate, row.candidate)
    if old.problem:
        return f"{move}: {old.problem}{guess}"
    gained = old.seconds - row.seconds
    cost = switch_seconds(given, predictor.roofline, old.candidate, row.candidate)
    text = f"{move}: {_situation(predictor, old)}; predicted {_percent(old, row)}"
    text += f" and {cost:.1f} s to switch"
    if gained > 0:
        count = math.ceil(cost / gained) or 1
        text += f", repaid after {count} iteration{'s' if count > 1 else ''}"
    return text + guess


def _kept(predictor: Predictor, rows: list[Prediction], row: Prediction, running: bool) -> str:
    verb = "kept" if running else "chosen"
    text = f"{row.candidate.label} {verb}: {_situation(predictor, row)}"
    others = [r for r in rows if r.allowed and r.candidate != row.candidate]
    if others and others[0].seconds < row.seconds:
        text += f"; {others[0].candidate.label} would gain {_percent(row, others[0])}"
        return text + ", too little for a switch or for the stages together"
    if others:
        slower = others[0].seconds / row.seconds - 1
        text += (
            f"; the next best, {others[0].candidate.label}, would take {100 * slower:.1f} % more"
        )
    return text


def _percent(old: Prediction, new: Prediction) -> str:
    return f"{100 * (old.seconds / new.seconds - 1):+.1f} %" if new.seconds > 0 else "nothing"


def _situation(predictor: Predictor, row: Prediction) -> str:
    layout, load = row.candidate, predictor.now
    used = f"{100 * row.peak / row.budget:.0f} % of memory"
    if layout.stage != "rollout":
        return f"the longest sample, {tokens(load.longest)} tokens, fills {used}"
    share = load.episodes / layout.replicas
    offered = max(1.0, min(share, layout.running or share))
    sequences = f"{offered:.0f} sequences x {tokens(load.context)} tokens"
    if not row.filled:
        return f"{sequences} fill {used}"
    place = f"the KV cache at TP {layout.tensor}"
    if row.filled > 9.99:
        return f"{sequences} are far too many for {place}"
    return f"{sequences} fill {100 * row.filled:.0f} % of {place}"


def _move(old: Candidate, new: Candidate) -> str:
    """The fields that differ, such as `TP 4 → 8`; whole layouts when many do."""
    changed = [
        (name, a, b)
        for name, a, b in zip(Candidate._fields, old, new, strict=True)
        if a != b and name not in ("replicas", "threads")
    ]
    names = {"tensor": "TP", "context": "CP", "microbatch": "microbatch", "running": "running"}
    if len(changed) == 1 and changed[0][0] in names:
        name, before, after = changed[0]
        return f"{names[name]} {before} → {after}"
    return f"{old.label} → {new.label}"


def tokens(count: float) -> str:
    """Such as `812` or `31K`, in units of 1,024."""
    return f"{count:.0f}" if count < 1024 else f"{count / 1024:.0f}K"
