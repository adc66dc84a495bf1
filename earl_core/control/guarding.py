"""The guard of a run: what an iteration is judged by, what is decided, and who is told."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from earl_core.control.run_controller import RunController
from earl_core.deployment.stages import rows_of
from earl_core.dispatch import Manifest, ManifestError
from earl_core.environments.rewards.reward_functions import BUILT_IN
from earl_core.experience.probe import PROBE, Asked, Probe
from earl_core.experience.probe_drawing import draw_probe
from earl_core.guard.decision import Decision, Finding, decision_of
from earl_core.guard.detectors import REMEMBERED, Numbers, Settings, detect
from earl_core.guard.ladder import CONFIRMED, Past, decide, last_good
from earl_core.guard.rewards import reward_findings, seen_bounds, since
from earl_core.guard.seen import SEEN, Bounds, Seen, environment_source, function_source, numbers_of
from earl_core.run.episodes import EpisodesDamaged
from earl_core.run.retention import good_checkpoints

logger = logging.getLogger(__name__)

_BRANCHES = "branches"
"""Of run.json: what the run went back for."""


def bounds_of(controller: RunController, iteration: int) -> dict[str, Bounds] | None:
    """Bounds of the rewards of an iteration by their sources: declared, or else as seen in the
    iterations that had ended; None where nobody looks."""
    config = controller.config
    if config.guard == "off":
        return None
    sources = [environment_source(label) for label in config.played]
    sources += [function_source(each.title) for each in config.reward.functions]
    history = _history(controller, iteration)
    return {s: controller.ranges.get(s) or seen_bounds(history, s) for s in sources}


def probe_places(controller: RunController, iteration: int, most: int) -> list[int]:
    """The episodes of the probe that an iteration asks for; none before it can be drawn. most: of
    them, once all were asked for."""
    config, run = controller.config, controller.run
    ended = _ended(controller, iteration)
    if config.guard == "off" or ended < 0:
        return []
    with _drawing:
        probe = Probe.read(run.path)
        if probe is None:
            files = (run.episodes_path(number) for number in range(ended + 1))
            file = next((each for each in files if each.is_file()), None)
            if file is None:
                return []
            try:
                probe = draw_probe(file, config.seed, iteration)
            except (EpisodesDamaged, OSError) as error:
                logger.warning("iteration %d: the guard has no probe: %s", iteration, error)
                return []
            probe.write(run.path)
            number = len(probe.episodes)
            run.note(iteration, "guard", f"a probe of {number} episodes is drawn of {file}")
    return probe.places(iteration, most, config.rollout.episodes_per_iteration)


_drawing = threading.Lock()


def probed_functions(controller: RunController) -> list[str]:
    """Labels of the reward functions that score the probe: not models behind endpoints, not scores
    that come later, nor those that have answered otherwise by themselves."""
    probe = Probe.read(controller.run.path)
    off = (probe and probe.off) or []
    functions = controller.config.reward.functions
    own = [each.title for each in functions if each.function not in BUILT_IN]
    return [title for title in own if function_source(title) not in off]


def _probe_findings(
    controller: RunController,
    iteration: int,
    manifests: Mapping[str, Manifest],
    earlier: Mapping[int, Decision],
) -> list[Finding]:
    """Findings about sources that answer the probe otherwise than before. The first time they are
    left alone from then on instead."""
    run = controller.run
    sealed = rows_of(manifests), manifests["reward"]
    asked = [Asked.model_validate(each.outputs.get(PROBE, {})) for each in sealed]
    probe = Probe.read(run.path)
    if probe is None or not any(each.asked for each in asked):
        return []
    otherwise = {source: told for each in asked for source, told in each.otherwise.items()}
    answers = {source: number for each in asked for source, number in each.asked.items()}
    if probe.off is None:
        for source, told in otherwise.items():
            number, how = told[0]
            text = (
                f"{source} answers {len(told)} of {answers[source]} recorded episodes otherwise "
                f"than a moment ago (episode {number}: {how}): changes in it cannot be told"
            )
            logger.warning("iteration %d: %s", iteration, text)
            run.note(iteration, "guard", text)
        probe.model_copy(update={"off": sorted(otherwise)}).write(run.path)
        return []
    found = []
    for source, told in otherwise.items():
        if source in probe.off:
            continue
        kind = "probe_environment" if source.startswith("environment") else "probe_reward"
        number, how = told[0]
        text = (
            f"{source} answers {len(told)} of {answers[source]} recorded episodes otherwise than "
            f"before: episode {number} gives {how}"
        )
        named = tuple(each for each, _ in told)
        onset = since(kind, iteration, earlier)
        found.append(Finding(kind=kind, onset=onset, text=text, episodes=named))
    return found


def diagnose(
    controller: RunController, iteration: int, manifests: Mapping[str, Manifest]
) -> Decision:
    """Judge an iteration by its sealed rollout and rewards, and by those before that had ended.

    Equal whenever it is asked for: a resumed run decides the same.
    """
    config = controller.config
    if config.guard == "off":
        return Decision()
    rollout, past = rows_of(manifests), _past(controller, iteration)
    seen = seen_in(manifests)
    bounds = bounds_of(controller, iteration) or {}
    failures = rollout.outputs.get("failures", {})
    declared = controller.ranges
    findings = reward_findings(iteration, seen, failures, bounds, declared, past.earlier)
    now = {
        "iteration": iteration,
        **{f"rollout/{name}": value for name, value in rollout.metrics.items()},
        **{f"guard/{name}": value for name, value in numbers_of(seen).items()},
    }
    settings = Settings(config.update.max_grad_norm, config.update.least_sample_size)
    findings += _probe_findings(controller, iteration, manifests, past.earlier)
    findings += detect(_history(controller, iteration), now, settings)
    if config.guard == "warn":
        decision = Decision(findings=tuple(findings))
    else:
        outside = sorted({number for each in seen.values() for number in each.outside})
        mostly = any(each.mostly_outside for each in seen.values())
        decision = decide(iteration, findings, outside, mostly, past)
    _tell(controller, iteration, decision, past)
    return decision


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
        "cautious": float(decision.cautious),
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
    if advantage is not None:
        found = last_good(iteration, decision_of(advantage), _past(controller, iteration))
        kept |= set() if found is None else {found}
    return kept


def _ended(controller: RunController, iteration: int) -> int:
    """The last iteration whose numbers are known whenever this one is judged."""
    return iteration - 1 - controller.config.schedule.staleness


def _history(controller: RunController, iteration: int) -> list[Numbers]:
    ended = _ended(controller, iteration)
    return [line for line in controller.run.metrics() if line["iteration"] <= ended]


def _past(controller: RunController, iteration: int) -> Past:
    run, ended = controller.run, _ended(controller, iteration)
    earlier = {}
    for line in _history(controller, iteration)[-REMEMBERED:]:
        if line.get("guard/findings") or line.get("guard/cautious"):
            number = int(line["iteration"])
            # What cannot be read says nothing.
            with suppress(ManifestError, ValidationError):
                earlier[number] = decision_of(run.manifest(number, "advantage"))
    checkpoints = [each for each in run.stable_iterations() if each <= ended]
    lag = controller.config.schedule.staleness
    return Past(earlier, lag, checkpoints, len(run.record.get(_BRANCHES, ())))


def _tell(controller: RunController, iteration: int, decision: Decision, past: Past) -> None:
    """Say what is new; the seal has all of it."""
    known = {
        each.kind
        for number, before in past.earlier.items()
        for each in before.findings
        if number >= iteration - past.lag - CONFIRMED
    }
    for each in decision.findings:
        if each.kind in known:
            continue
        text = told(each)
        logger.warning("iteration %d: %s", iteration, text)
        evidence: dict[str, Any] = each.model_dump(mode="json")
        controller.run.note(iteration, "guard", f"found: {text}", finding=evidence)
    if decision.quarantined:
        text = f"{len(decision.quarantined)} episodes leave their groups"
        controller.run.note(iteration, "guard", text, episodes=list(decision.quarantined))


def told(finding: Finding) -> str:
    """A finding as one line for people."""
    named = ", ".join(map(str, finding.episodes[:_SHOWN]))
    more = ", ..." if len(finding.episodes) > _SHOWN else ""
    episodes = f" (episodes {named}{more})" if named else ""
    return f"{finding.kind}, since iteration {finding.onset}: {finding.text}{episodes}"


_SHOWN = 5
