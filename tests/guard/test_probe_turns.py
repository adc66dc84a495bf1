"""The probe over iterations: a source that turned for few episodes is asked for them again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from earl_core.control.guard_probe import probe_findings, probed_environments, source_settings
from earl_core.dispatch import Manifest
from earl_core.experience.probe import ASKED, PROBE, SIZE, Asked, Probe
from earl_core.guard.decision import GUARD, Decision, Finding
from earl_core.guard.ladder import Past, decide
from earl_core.run import RunDirectory
from tests.experience.test_probe import probed
from tests.run.test_run_directory import config_in

BEGINS, WRONG = 10, (6, 7)
"""The environment pays otherwise for two recorded episodes from this iteration on."""


class Turning:
    """A run, of which only the guard's part is done."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.controller: Any = SimpleNamespace(run=run, config=run.config, guard_faults=set())
        self.past: dict[int, Decision] = {}
        Probe(
            settings=source_settings(run.config),
            episodes=[probed(number) for number in range(SIZE)],
            settled=["environment"],
        ).write(run.path)

    def iteration(self, number: int, wrong: tuple[int, ...]) -> list[int]:
        """Play, judge and end one; the episodes that were asked for."""
        (places,) = probed_environments(self.controller, number).values()
        probe = Probe.read(self.run.path)
        assert probe is not None
        asked = Asked(of=probe.name)
        for place in places:
            asked.add("environment", place, "turn 4 is paid 1" if place in wrong else "")
        sealed = {"rollout": {PROBE: asked.model_dump(mode="json")}, "reward": {}}
        manifests = {name: self._manifest(number, name, each) for name, each in sealed.items()}
        findings = probe_findings(self.controller, number, manifests)
        self._decide(number, findings)
        return list(places)

    def _decide(self, number: int, findings: list[Finding]) -> None:
        past = Past(self.past, 0, list(range(number)), 0)
        decision = self.past[number] = decide(number, findings, (), False, past)
        told = {GUARD: decision.model_dump(mode="json")}
        self.run.seal(self._manifest(number, "advantage", told))
        kinds = {f"guard/{each.kind}": 1.0 for each in findings}
        self.run.append_metrics(number, {"guard/findings": float(len(findings)), **kinds})

    def _manifest(self, iteration: int, stage: str, outputs: dict[str, Any]) -> Manifest:
        given = {"run": self.run.uid, "iteration": iteration, "key": "k", "policy_version": 1}
        return Manifest(**given, stage=stage, outputs=outputs)


@pytest.fixture
def turning(tmp_path: Path) -> Iterator[Turning]:
    with closing(RunDirectory.open(config_in(tmp_path))) as run:
        yield Turning(run)


def test_what_turned_for_few_is_confirmed_at_once_and_undone_whole(turning: Turning) -> None:
    for number in range(BEGINS):
        turning.iteration(number, ())
    for number in range(BEGINS, 15):
        turning.iteration(number, WRONG)
    found = [number for number, each in turning.past.items() if each.findings]
    # Iteration 12 is the first that asks for them in turn; all were right in iteration 8.
    assert found == [12, 13, 14]
    (finding,) = turning.past[12].findings
    assert (finding.onset, finding.episodes) == (9, WRONG)
    assert finding.text.endswith("all of them were asked for since iteration 9")
    assert turning.past[12].back_to is None
    assert turning.past[13].back_to == 8


def test_what_was_found_is_asked_for_until_it_is_right_and_the_others_in_turn(
    turning: Turning,
) -> None:
    for number in range(4):
        turning.iteration(number, ())
    asked = [turning.iteration(number, WRONG if number < 6 else ()) for number in range(4, 16)]
    assert [set(WRONG) <= set(places) for places in asked[:5]] == [True] * 5
    assert {len(places) for places in asked} == {ASKED}
    assert {place for places in asked[-4:] for place in places} == set(range(SIZE))


def test_a_branch_is_gone_back_from_no_further_than_to_where_it_began(turning: Turning) -> None:
    for number in range(8):
        turning.iteration(number, ())
    told = {"kinds": ["probe_environment"], "text": "", "left_out": (), "set_aside": ""}
    turning.run.branches = turning.run.branches.further(after=7, from_iteration=9, **told)
    turning.iteration(8, WRONG)
    turning.iteration(9, (8, 9))
    (finding,) = turning.past[9].findings
    assert (finding.onset, finding.episodes) == (8, (8, 9))


def test_what_turned_for_most_has_done_so_now(turning: Turning) -> None:
    for number in range(9):
        turning.iteration(number, ())
    turning.iteration(9, tuple(range(SIZE)))
    (finding,) = turning.past[9].findings
    assert (finding.onset, len(finding.episodes)) == (9, ASKED)
