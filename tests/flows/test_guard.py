"""Whole runs whose rewards go wrong, and what the guard says of them."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from earl_core.experience.probe import Probe
from earl_core.guard.decision import GUARD, NOT_JUDGED, Decision
from tests.experience.scoring_functions import goes_wrong
from tests.flows.runs import Runs

EPISODES, BEGINS = 16, 3


def turning(run: str, weight: float, *kinds: str) -> list[str]:
    """Overrides of a run whose functions go wrong in an iteration, one in each way."""
    functions = [
        {
            "function": "tests.experience.scoring_functions:turning",
            "label": kind,
            "weight": weight,
            "options": {
                "into": kind,
                "begins": BEGINS,
                "of_iteration": EPISODES,
                "run": run,
                "share": 0.2,
            },
        }
        for kind in kinds
    ]
    return [
        f"name={run}",
        "reward.max_failed_share=0.5",
        f"reward.functions={json.dumps(functions)}",
    ]


def decisions(runs: Runs, name: str, iterations: int) -> list[Decision]:
    found = []
    for iteration in range(iterations):
        path = runs.run(name) / "iterations" / f"{iteration:06d}" / "advantage.json"
        outputs = json.loads(path.read_text())["outputs"]
        found.append(Decision.model_validate(outputs[GUARD]))
    return found


@pytest.mark.slow
def test_rewards_that_go_wrong_are_found_and_a_resume_finds_the_same(runs: Runs) -> None:
    ways = "nan", "huge", "flipped"
    again = ["iterations=6", *turning("again", 0.0, *ways)]
    endings = runs.train_here(
        {"overrides": ["iterations=6", *turning("run", 0.0, *ways)]},
        {"overrides": again, "fault": "advantage.seal@4=raise"},
        {"overrides": again},
    )
    assert [ending is None for ending in endings] == [True, False, True], endings
    whole = decisions(runs, "run", 6)
    assert whole == decisions(runs, "again", 6)
    assert whole[:BEGINS] == [Decision()] * BEGINS
    for iteration, decision in enumerate(whole[BEGINS:], BEGINS):
        found = {each.kind: each for each in decision.findings}
        assert found.keys() >= {"reward_invalid", "reward_range"}
        numbers = range(iteration * EPISODES, (iteration + 1) * EPISODES)
        nan = [number for number in numbers if goes_wrong(number, "nan")]
        huge = [each for each in numbers if goes_wrong(each, "huge") and each not in nan]
        invalid, outside = found["reward_invalid"], found["reward_range"]
        assert invalid.onset == outside.onset == BEGINS
        assert (list(invalid.episodes), list(outside.episodes)) == (nan, huge)
        assert len(nan) > 1
        assert len(huge) > 1
        assert "1e+30" in outside.text
        # `warn` says so and does nothing.
        assert decision.quarantined == ()
        assert not decision.cautious
        assert decision.back_to is None
    assert any(f.kind == "probe_reward" for each in whole[BEGINS:] for f in each.findings)
    metrics = runs.metrics("run")
    assert [line["guard/findings"] > 0 for line in metrics] == [False] * 3 + [True] * 3
    told = [line for line in runs.ledger("run") if line["stage"] == "guard" and "finding" in line]
    # When they begin, and not again.
    assert {line["iteration"] for line in told} == {BEGINS}
    assert {line["finding"]["kind"] for line in told} == {
        each.kind for each in whole[BEGINS].findings
    }


@pytest.mark.slow
def test_episodes_with_impossible_rewards_leave_their_groups(runs: Runs) -> None:
    """A fifth of the rewards is 1e30, which no gradient stands, and a fifth is none at all."""
    acts = ["iterations=5", "guard=act", *turning("acts", 0.1, "nan", "huge")]
    acts[acts.index("reward.max_failed_share=0.5")] = "reward.max_failed_share=0"
    (ending,) = runs.train_here({"overrides": acts})
    assert ending is None
    made = decisions(runs, "acts", 5)
    assert made[:BEGINS] == [Decision()] * BEGINS
    for iteration, (line, decision) in enumerate(zip(runs.metrics("acts"), made, strict=True)):
        numbers = range(iteration * EPISODES, (iteration + 1) * EPISODES)
        nan = [each for each in numbers if goes_wrong(each, "nan")]
        huge = [each for each in numbers if goes_wrong(each, "huge") and each not in nan]
        if iteration < BEGINS:
            nan = huge = []
        assert decision.quarantined == tuple(huge)
        assert line["guard/quarantined"] == len(huge)
        assert line["advantage/episodes_failed"] == len(nan)
        kept = line["advantage/episodes_kept"] + line["advantage/episodes_dropped_with_group"]
        assert kept == EPISODES - len(nan) - len(huge)
        assert abs(line["advantage/std"]) < 1e3
    runs.assert_learnt("acts")


def test_a_guard_that_cannot_look_ends_no_run_and_its_probe_begins_anew(
    runs: Runs, undisturbed: Callable[..., Runs]
) -> None:
    """Its probe can be neither read nor written, on which all that is compared depends."""
    assert runs.train_here({"overrides": ["iterations=1"]}) == [None]
    place = runs.run() / "probe.json"
    place.unlink()
    (place / "in the way").mkdir(parents=True)
    acts = ["iterations=3", "guard=act", "checkpoint.keep_last=3"]
    assert runs.train_here({"overrides": ["iterations=2", *acts[1:]]}) == [None]
    assert runs.weights(1) == undisturbed().weights(1)
    (found,) = decisions(runs, "run", 2)[1].findings
    assert (found.kind, found.onset) == (NOT_JUDGED, 1)
    assert "the guard could not look at the iteration: IsADirectoryError" in found.text
    told = [line["event"] for line in runs.ledger() if "could not look" in line["event"]]
    assert len(told) == len(set(told)) > 1
    (place / "in the way").rmdir()
    place.rmdir()
    assert runs.train_here({"overrides": acts}) == [None]
    assert decisions(runs, "run", 3)[2] == Decision()
    # Earlier episodes may be of sources that somebody has put right since.
    probe = Probe.read(runs.run())
    assert probe is not None
    assert (probe.since, probe.episodes) == (2, [])
    runs.assert_learnt()
