"""What follows from the guard's decisions: a cautious update, a return in a new branch, a stop."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from earl_core.run.episodes import read_episodes
from earl_core.run.record import read_record
from tests.flows.runs import KILLED, Runs
from tests.flows.test_stream import stream

THREE = "iterations=3"
FOUND = {"kind": "reward_shift", "onset": 1, "text": "The mean reward fell.", "prompts": [["", 5]]}
BACK: dict[str, Any] = {"iteration": 2, "findings": [FOUND], "back_to": 0}
KEEPING = (THREE, "checkpoint.keep_last=3")


def branches(runs: Runs, name: str = "run") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read_record(runs.run(name)).get("branches", [])
    return found


def prompts(runs: Runs, iteration: int, name: str = "run") -> set[int]:
    path = runs.run(name) / "iterations" / f"{iteration:06d}" / "episodes.parquet"
    return {each["prompt_id"] for each in read_episodes(path)}


def test_a_return_plays_otherwise_in_a_branch_and_leaves_prompts_out(
    runs: Runs, undisturbed: Callable[..., Runs]
) -> None:
    whole = undisturbed(*KEEPING)
    assert runs.train_here({"overrides": KEEPING, "decisions": [BACK]}) == [None]
    (branch,) = branches(runs)
    assert (branch["number"], branch["after"], branch["from_iteration"]) == (1, 0, 2)
    assert (branch["kinds"], branch["pending"]) == (["reward_shift"], False)
    assert branch["left_out"] == [["", 5]]
    aside = runs.run() / branch["set_aside"]
    assert sorted(path.name for path in (aside / "iterations").iterdir()) == ["000001", "000002"]
    assert (aside / "iterations" / "000002" / "advantage.json").is_file()
    assert runs.weights(0) == whole.weights(0)
    assert runs.weights(1) != whole.weights(1)
    assert 5 in prompts(whole, 1)
    assert prompts(runs, 1) == {4, 6, 7, 8}
    assert prompts(runs, 2) == {9, 10, 11, 12}
    runs.assert_learnt()
    assert [line["iteration"] for line in runs.metrics()] == [0, 1, 2]
    assert runs.shared_memory() == []


def test_a_return_that_is_killed_twice_ends_with_the_same_bits(runs: Runs) -> None:
    """In the middle of moving things, and when all is moved and nothing says so."""
    runs.environment["EARL_TEST_DECISIONS"] = json.dumps([BACK])
    assert runs.train_here({"overrides": [*KEEPING, "name=whole"], "decisions": [BACK]}) == [None]
    runs.train(*KEEPING, fault="aside.iterations@2=kill", expect=KILLED)
    assert branches(runs)[0]["pending"]
    assert (runs.run() / "iterations" / "000002" / "advantage.json").is_file()
    runs.train(*KEEPING, fault="return.moved@2=kill", expect=KILLED)
    assert branches(runs)[0]["pending"]
    runs.train(*KEEPING)
    assert [each["pending"] for each in branches(runs)] == [False]
    for iteration in range(3):
        assert runs.weights(iteration) == runs.weights(iteration, "whole")
    runs.assert_learnt()
    assert runs.shared_memory() == []


def test_an_iteration_by_itself_returns_and_the_next_goes_on(runs: Runs) -> None:
    """It ends without an error, and what it began is done when it has ended."""
    whole = {"overrides": [*KEEPING, "name=whole"], "decisions": [BACK]}
    begun = {"overrides": KEEPING, "fault": "select.before@0=raise"}
    alone = {"alone": "run", "decisions": [BACK]}
    (first, *endings) = runs.train_here(begun, alone, alone, alone, alone, alone, whole)
    assert "injected failure" in str(first)
    assert endings == [None] * 6
    assert [each["pending"] for each in branches(runs)] == [False]
    assert [line["iteration"] for line in runs.metrics()] == [0, 1, 2]
    assert runs.weights(2) == runs.weights(2, "whole")
    runs.assert_learnt()


def test_a_stop_says_why_and_goes_on_when_settings_have_changed(runs: Runs) -> None:
    stop = {"iteration": 1, "findings": [FOUND], "stop": "the run went back three times"}
    step = {"overrides": [], "decisions": [stop]}
    other = {"overrides": ["update.learning_rate=5e-4"]}
    first, second, last = runs.train_here(step, {"overrides": []}, other)
    assert first == second
    assert "iteration 1, before its update: the run went back three times" in str(first)
    assert "The mean reward fell (reward_shift)" in str(first)
    assert "earl resume" in str(first)
    assert last is None
    # The advantages of iteration 1 were made once.
    assert runs.executed("sealed").count((1, "advantage")) == 1
    runs.assert_learnt()


def test_a_cautious_update_has_a_lower_rate_and_a_higher_penalty(
    runs: Runs, undisturbed: Callable[..., Runs]
) -> None:
    """As a run of those settings from there on; and nothing else is another one's."""
    cautious = {"iteration": 1, "cautious": True}
    by_hand = ["name=hand", "update.learning_rate=3e-4"]
    kl = 'algorithm.kl={"placement": "loss", "coefficient": 0.03}'
    endings = runs.train_here(
        {"decisions": [cautious]},
        {"overrides": ["name=hand"], "fault": "update.before@1=raise"},
        {"overrides": [*by_hand, kl]},
    )
    assert (endings[0], endings[2]) == (None, None)
    assert runs.weights(0) == undisturbed().weights(0)
    assert runs.weights(1) == runs.weights(1, "hand") != undisturbed().weights(1)
    assert [line.get("guard/cautious") for line in runs.metrics()] == [None, 1.0]
    assert runs.metrics()[1]["update/learning_rate"] == 3e-4
    (line,) = [each for each in runs.ledger() if each["event"].startswith("cautious")]
    assert line["event"].endswith("the learning rate is x 0.3, the KL coefficient x 3")
    runs.assert_learnt()


STALE = (
    "iterations=4",
    "schedule.staleness=1",
    "algorithm.importance_correction={}",
    "checkpoint.keep_last=4",
)


@pytest.mark.slow
def test_iterations_that_run_ahead_end_before_the_run_goes_back(runs: Runs) -> None:
    """Side by side and killed, with the bits of iterations in turn."""
    runs.environment["EARL_TEST_DECISIONS"] = json.dumps([BACK])
    in_turn = {"overrides": [*STALE, "name=turn"], "decisions": [BACK]}
    assert runs.train_here(in_turn) == [None]
    beside = (*STALE, "stages.placement=shared")
    runs.train(*beside, fault="return.noted@2=kill", expect=KILLED)
    runs.wait_for_workers_to_end()
    runs.train(*beside)
    assert [each["after"] for each in branches(runs)] == [0]
    assert [runs.weights(k) for k in range(4)] == [runs.weights(k, "turn") for k in range(4)]
    aside = runs.run() / branches(runs)[0]["set_aside"] / "iterations"
    assert {path.name for path in aside.iterdir()} >= {"000001", "000002", "000003"}
    runs.assert_learnt()
    assert runs.shared_memory() == []


@pytest.mark.slow
def test_groups_of_a_stream_are_played_anew_in_a_branch(runs: Runs) -> None:
    given = stream(1, 4)
    runs.environment |= {"EARL_TEST_DECISIONS": json.dumps([BACK]), "EARL_CLOCK": "4"}
    runs.train(*given, "checkpoint.keep_last=4", "name=whole")
    runs.train(*given, "checkpoint.keep_last=4", fault="return.begun@2=kill", expect=KILLED)
    runs.wait_for_workers_to_end()
    runs.train(*given, "checkpoint.keep_last=4")
    for name in ("run", "whole"):
        (branch,) = branches(runs, name)
        assert (runs.run(name) / branch["set_aside"] / "groups.jsonl").is_file()
        assert prompts(runs, 1, name) == {4, 6, 7, 8}
        runs.assert_learnt(name)
    assert [runs.weights(k) for k in range(4)] == [runs.weights(k, "whole") for k in range(4)]
    assert runs.shared_memory() == []
