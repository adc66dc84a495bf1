"""What follows from the guard's decisions: a cautious update, a return in a new branch, a stop."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from earl_core.run.record import read_record
from tests.flows.runs import KILLED, Runs

THREE = "iterations=3"
FOUND = {"kind": "reward_shift", "onset": 1, "text": "The mean reward fell.", "prompts": [["", 5]]}
BACK: dict[str, Any] = {"iteration": 2, "findings": [FOUND], "back_to": 0}
KEEPING = (THREE, "checkpoint.keep_last=3")


def branches(runs: Runs, name: str = "run") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read_record(runs.run(name)).get("branches", [])
    return found


def prompts(runs: Runs, iteration: int, name: str = "run") -> set[int]:
    from earl_core.run.episodes import read_episodes

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
