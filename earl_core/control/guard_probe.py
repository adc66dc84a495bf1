"""The guard's probe in a run: drawn once, asked in turn, compared."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterable, Mapping

from earl_core.config import RunConfig
from earl_core.config.stage_keys import stage_settings
from earl_core.control.guard_decisions import decisions_of
from earl_core.control.guard_faults import contained, tell_fault
from earl_core.control.run_controller import RunController
from earl_core.deployment.stages import rows_of
from earl_core.dispatch import Manifest
from earl_core.environments.rewards.reward_functions import BUILT_IN
from earl_core.experience.probe import PROBE, Asked, Probe
from earl_core.experience.probe_drawing import draw_probe
from earl_core.guard.decision import Finding
from earl_core.guard.ladder import CONFIRMED, OPEN, PROBED
from earl_core.guard.seen import environment_source, function_source
from earl_core.run.episodes import PROBE_NAME, EpisodesDamaged
from earl_core.system.files import canonical_json

logger = logging.getLogger(__name__)

_drawing = threading.Lock()


def ended_before(controller: RunController, iteration: int) -> int:
    """The last iteration whose numbers are known whenever this one is judged."""
    return iteration - 1 - controller.config.schedule.staleness


def probed_environments(controller: RunController, iteration: int) -> dict[str, list[int]]:
    """Places of the probe's episodes that environments replay in an iteration, by source. Those
    that cannot replay are found where they are played."""
    played = controller.config.played.items()
    sources = [
        environment_source(label)
        for label, each in played
        if each.agent is None and each.train == "policy" and not (each.tools or each.mcp)
    ]
    return _places(controller, iteration, sources)


def probed_functions(controller: RunController, iteration: int) -> dict[str, list[int]]:
    """Likewise of those that reward functions score: not models behind endpoints, nor scores that
    come later."""
    functions = controller.config.reward.functions
    own = [function_source(each.title) for each in functions if each.function not in BUILT_IN]
    return _places(controller, iteration, own)


def compared_since(controller: RunController, iteration: int) -> int:
    """The first iteration whose sources of rewards had the settings that they have: what others
    gave is nothing to compare with."""
    with _drawing:
        return _current(controller, iteration).since


def _places(
    controller: RunController, iteration: int, sources: Iterable[str]
) -> dict[str, list[int]]:
    if controller.config.guard == "off":
        return {}
    probe = contained(
        controller, iteration, "its probe", lambda: _drawn(controller, iteration), None
    )
    if probe is None:
        return {}
    episodes = controller.config.rollout.episodes_per_iteration
    found = contained(
        controller, iteration, "what was found", lambda: _found(controller, iteration), set[int]()
    )
    places = {source: probe.places(source, iteration, episodes, found) for source in sources}
    return {source: asked for source, asked in places.items() if asked}


def _found(controller: RunController, iteration: int) -> set[int]:
    """Ids of episodes that were answered otherwise lately: asked for again at once, a source shows
    whether it does so still. Of iterations that have ended, however far those go that run ahead."""
    ended = ended_before(controller, iteration)
    lines = (each for each in controller.run.numbers.read()[-OPEN:] if each["iteration"] <= ended)
    told = [
        int(each["iteration"])
        for each in lines
        if each["iteration"] > ended - CONFIRMED and any(each.get(f"guard/{k}") for k in PROBED)
    ]
    known = decisions_of(controller.run, told).values()
    findings = (found for each in known for found in each.findings)
    return {e for each in findings if each.kind in PROBED for e in each.episodes}


def _drawn(controller: RunController, iteration: int) -> Probe | None:
    """The run's probe, drawn now where there is none; None before an iteration whose episodes are
    kept has ended. Raises as `draw_probe` does, and `EpisodesDamaged` where none is of use."""
    config, run = controller.config, controller.run
    with _drawing:
        probe = _current(controller, iteration)
        if probe.episodes:
            return probe
        ended = ended_before(controller, iteration)
        files = (run.episodes_path(each) for each in range(probe.since, ended + 1))
        file = next((each for each in files if each.is_file()), None)
        if file is None:
            return None
        probe.episodes = draw_probe(file, config.seed, run.branches)
        if not probe.episodes:
            raise EpisodesDamaged(f"{file} holds no episode without a secret")
        probe.write(run.path)
    text = f"a probe of {len(probe.episodes)} episodes is drawn of iteration {file.parent.name}"
    run.note(iteration, "guard", text)
    return probe


def _current(controller: RunController, iteration: int) -> Probe:
    """The run's probe, drawn or not; a new one where there is none, or its sources have changed:
    episodes from before are of others, or of what somebody has put right."""
    settings, path = source_settings(controller.config), controller.run.path
    probe = Probe.read(path)
    if probe is None or probe.settings != settings:
        probe = Probe(settings=settings, since=iteration)
        probe.write(path)
    return probe


def source_settings(config: RunConfig) -> str:
    """A digest of what decides how sources answer."""
    asked = {
        "functions": stage_settings(config, "reward"),
        "played": stage_settings(config, "rollout"),
    }
    names = ("reward.functions", "reward.python", "environment", "environments", "seed")
    kept = [{name: each[name] for name in names if name in each} for each in asked.values()]
    return hashlib.sha256(canonical_json(kept)).hexdigest()


def probe_findings(
    controller: RunController, iteration: int, manifests: Mapping[str, Manifest]
) -> list[Finding]:
    """Findings about sources that answer the probe otherwise than before. One that does so the
    first time it is asked is not judged for a while instead."""
    sealed = rows_of(manifests), manifests["reward"]
    asked = [Asked.model_validate(each.outputs.get(PROBE, {})) for each in sealed]
    for host in (each.unread for each in asked if each.unread):
        error = FileNotFoundError(f"{controller.run.path / PROBE_NAME} cannot be read there")
        tell_fault(controller, iteration, f"recorded episodes on host {host}", error)
    probe = Probe.read(controller.run.path)
    # A stage may be sealed since before another probe was drawn.
    asked = [] if probe is None else [each for each in asked if each.of == probe.name]
    if probe is None or not any(each.asked or each.silent for each in asked):
        return []
    now, told = probe.after(asked, iteration)
    for source, what in told.items():
        text = f"{source} {what}"
        logger.warning("iteration %d: %s", iteration, text)
        controller.run.note(iteration, "guard", text)
    if now != probe:
        now.write(controller.run.path)
    found = []
    for part in asked:
        for source in sorted(part.otherwise.keys() - {*now.off, *now.unsteady}):
            found.append(_finding(controller, iteration, probe, part, source))
    return found


def _finding(
    controller: RunController, iteration: int, probe: Probe, part: Asked, source: str
) -> Finding:
    """The finding that a source answers otherwise. Where it does so for fewer than half, they may
    be wrong since they were asked for last, but not since before the branch, which begins where all
    was well."""
    told, text = part.otherwise[source], f"{source} {part.text(source, 'before')}"
    onset = iteration
    if 2 * len(told) < part.asked[source]:
        turn = probe.turn(source, controller.config.rollout.episodes_per_iteration)
        branch = controller.run.branches.at(iteration)
        begins = 0 if branch is None else branch.after + 1
        onset = max(probe.since, begins, iteration - turn + 1)
        text += f"; all of them were asked for since iteration {onset}"
    kind = PROBED[0] if source.startswith("environment") else PROBED[1]
    named = tuple(each for each, _ in told)
    return Finding(kind=kind, onset=onset, text=text, episodes=named)
