"""The guard of a run: what an iteration is judged by, what is decided, and who is told."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from earl_core.control.guard_decisions import decisions_of
from earl_core.control.guard_faults import contained, tell_fault
from earl_core.control.guard_probe import compared_since, ended_before, probe_findings
from earl_core.control.run_controller import RunController
from earl_core.deployment.stages import rows_of
from earl_core.dispatch import Manifest
from earl_core.environments.real_numbers import invalid_rewards
from earl_core.guard.decision import Decision, Finding, decision_of, not_judged
from earl_core.guard.detectors import Numbers, Settings, detect, without_sources
from earl_core.guard.ladder import CAUTION, OPEN, Past, decide, is_for_learning, last_good, recent
from earl_core.guard.rewards import reward_findings, seen_bounds, since
from earl_core.guard.seen import (
    SEEN,
    Bounds,
    Seen,
    can_leave,
    environment_source,
    function_source,
    numbers_of,
)
from earl_core.run import RunDirectory
from earl_core.run.branches import Branches
from earl_core.run.replay import replayed_groups
from earl_core.run.retention import good_checkpoints
from earl_core.secrets.rules import Redaction

logger = logging.getLogger(__name__)


def bounds_of(controller: RunController, iteration: int) -> dict[str, Bounds] | None:
    """Bounds of the rewards of an iteration by their sources: declared, or else as seen in the
    iterations that had ended; None where nobody looks."""
    if controller.config.guard == "off":
        return None
    what = "what its sources have given so far"
    return contained(controller, iteration, what, lambda: _bounds(controller, iteration), None)


def _bounds(controller: RunController, iteration: int) -> dict[str, Bounds]:
    config = controller.config
    sources = [environment_source(label) for label in config.played]
    sources += [function_source(each.title) for each in config.reward.functions]
    history = None
    found = {}
    for source in sources:
        if source not in controller.ranges and history is None:
            history = _history(controller, iteration)
        found[source] = controller.ranges.get(source) or seen_bounds(history or [], source)
    return found


def diagnose(
    controller: RunController, iteration: int, manifests: Mapping[str, Manifest]
) -> Decision:
    """Judge an iteration by its sealed rollout and rewards, and by those before that had ended.

    Equal whenever it is asked for: a resumed run decides the same. Never raises: an iteration that
    cannot be judged has the finding that says so, which nothing follows from.
    """
    if controller.config.guard == "off":
        return Decision()
    try:
        return _judged(controller, iteration, manifests)
    except Exception as error:
        tell_fault(controller, iteration, "the iteration", error)
        return Decision(findings=(not_judged(iteration, "the iteration", error),))


def _judged(
    controller: RunController, iteration: int, manifests: Mapping[str, Manifest]
) -> Decision:
    config = controller.config
    rollout, history = rows_of(manifests), _history(controller, iteration)
    past = _past(controller, iteration, history)
    seen = seen_in(manifests)
    bounds = bounds_of(controller, iteration) or {}
    invalid = invalid_rewards(rollout.outputs.get("failures", {}))
    declared = controller.ranges
    findings = reward_findings(iteration, seen, invalid, bounds, declared)
    now = {
        "iteration": iteration,
        **{f"rollout/{name}": value for name, value in rollout.metrics.items()},
        **{f"guard/{name}": value for name, value in numbers_of(seen).items()},
    }
    settings = Settings(config.update.max_grad_norm, config.update.least_sample_size)
    findings += probe_findings(controller, iteration, manifests)
    findings += detect(history, now, settings)
    findings = [since(each, recent(iteration, past)) for each in findings]
    if config.guard == "warn":
        decision = Decision(findings=tuple(findings))
    else:
        leave = can_leave(seen)
        outside = {number for each in seen.values() for number in each.outside} if leave else set()
        outside |= quarantined_before(controller.run, rollout)
        mostly = not leave or any(each.mostly_outside for each in seen.values())
        there = past._replace(checkpoints=returnable(past, config.checkpoint.keep_last))
        decision = decide(iteration, findings, sorted(outside), mostly, there)
    _tell(controller, iteration, decision, past)
    return decision


def quarantined_before(run: RunDirectory, rows: Manifest) -> set[int]:
    """Episodes that have left the groups which an iteration trains again, by the decisions of their
    own iterations: nobody looks at them twice. rows: the seal of the stage that wrote its rows."""
    size, again = run.config.rollout, set(replayed_groups(rows))
    homes = sorted({group // size.prompts_per_iteration for group in again})
    told = decisions_of(run, homes).values()
    return {e for each in told for e in each.quarantined if e // size.group_size in again}


def seen_in(manifests: Mapping[str, Manifest]) -> dict[str, Seen]:
    """What sources of rewards gave in an iteration, as its seal has it."""
    told = manifests["reward"].outputs.get(SEEN, {}) if "reward" in manifests else {}
    return {source: Seen.model_validate(each) for source, each in told.items()}


def guard_metrics(manifests: Mapping[str, Manifest]) -> dict[str, float]:
    """The numbers of the guard in an iteration, as metrics.jsonl has them: `guard/findings`, 1 for
    each kind that was found, and what later iterations compare with."""
    if "advantage" not in manifests or SEEN not in manifests["advantage"].outputs:
        return {}
    decision = decision_of(manifests["advantage"])
    found = {each.kind: 1.0 for each in decision.findings}
    told = {
        "findings": float(len(decision.findings)),
        **found,
        "quarantined": float(len(decision.quarantined)),
        "cautious": float(decision.caution),
    }
    return {f"guard/{n}": v for n, v in (told | numbers_of(seen_in(manifests))).items()}


def kept_for_return(
    controller: RunController, iteration: int, advantage: Manifest | None
) -> set[int]:
    """The checkpoints that a return may need: for what is found, and for what has begun already and
    is found later."""
    if controller.config.guard != "act":
        return set()
    kept = good_checkpoints(controller.run.stable_iterations())
    if advantage is None:
        return kept

    def found() -> int | None:
        past = _past(controller, iteration, _history(controller, iteration))
        return last_good(decision_of(advantage), past)

    what = "the checkpoints that a return may need"
    one = contained(controller, iteration, what, found, None)
    return kept if one is None else kept | {one}


def returnable(past: Past, keep_last: int) -> list[int]:
    """The checkpoints that a return may go to: those that are kept for it. Who was killed before
    the others were removed has more, and is to decide the same."""
    found = last_good(Decision(), past)
    kept = {*past.checkpoints[-keep_last:], *good_checkpoints(past.checkpoints), found}
    return [each for each in past.checkpoints if each in kept]


def _history(controller: RunController, iteration: int) -> list[Numbers]:
    """The numbers of the iterations that had ended; of what sources gave, only since they have had
    the settings that they have."""
    ended, since = ended_before(controller, iteration), compared_since(controller, iteration)
    lines = (line for line in controller.run.numbers.read() if line["iteration"] <= ended)
    return [line if line["iteration"] >= since else without_sources(line) for line in lines]


def _past(controller: RunController, iteration: int, history: Sequence[Numbers]) -> Past:
    run, ended = controller.run, ended_before(controller, iteration)
    told = (e for e in history[-OPEN:] if e.get("guard/findings") or e.get("guard/cautious"))
    earlier = decisions_of(run, (int(each["iteration"]) for each in told))
    checkpoints = [each for each in run.stable_iterations() if each <= ended]
    lag = controller.config.schedule.staleness
    returns, caution = len(run.branches.opened), branch_caution(run.branches, iteration)
    return Past(earlier, lag, checkpoints, returns, caution)


def branch_caution(branches: Branches, iteration: int) -> int:
    """How many times an iteration has the factors of a cautious update because of what its branch,
    and those that this one goes on from, began for: until it has passed where the run went back."""
    branch = branches.at(iteration)
    if branch is None or iteration > branch.from_iteration + CAUTION:
        return 0
    past = [each for each in branches.opened if each.number <= branch.number]
    return sum(is_for_learning(each.kinds) for each in past) if is_for_learning(branch.kinds) else 0


def _tell(controller: RunController, iteration: int, decision: Decision, past: Past) -> None:
    """Say what is new; the seal has all of it."""
    lately = recent(iteration, past).values()
    known = {each.kind for before in lately for each in before.findings}
    for each in decision.findings:
        if each.kind in known:
            continue
        text = told(each, controller.run.redaction)
        logger.warning("iteration %d: %s", iteration, text)
        evidence: dict[str, Any] = each.model_dump(mode="json")
        controller.run.note(iteration, "guard", f"found: {text}", finding=evidence)
    if decision.quarantined:
        text = f"{len(decision.quarantined)} episodes leave their groups"
        controller.run.note(iteration, "guard", text, episodes=list(decision.quarantined))


def told(finding: Finding, redaction: Redaction) -> str:
    """A finding as one line for people."""
    named = redaction.shown_ids(finding.episodes[:_SHOWN])
    more = ", ..." if len(finding.episodes) > _SHOWN else ""
    episodes = f" (episodes {named}{more})" if named else ""
    return f"{finding.kind}, since iteration {finding.onset}: {finding.text}{episodes}"


_SHOWN = 5
