"""What follows from the guard's decisions: a cautious update, a return in a new branch, a stop."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from earl_core.config import load_config
from earl_core.experience.probe import Probed
from earl_core.experience.probe_drawing import draw_probe
from earl_core.rollout.environment_pools import EnvironmentPools
from earl_core.run.branches import Branches
from earl_core.run.kept_episodes import read_episodes
from earl_core.run.record import read_record
from flows.cli.runs import summarize
from flows.cli.status import run_states
from tests.flows.runs import KILLED, Runs
from tests.flows.test_guard import BEGINS, turning
from tests.flows.test_stream import stream

FOUND = {"kind": "reward_shift", "onset": 1, "text": "The mean reward fell.", "prompts": [["", 5]]}
BACK: dict[str, Any] = {"iteration": 2, "findings": [FOUND], "back_to": 0}
KEEPING = ("iterations=3", "checkpoint.keep_last=3")
TOLD = "The mean reward fell (reward_shift)"
STOP = {
    "iteration": 1,
    "findings": [FOUND],
    "stop": f"the run went back three times, and this is still there: {TOLD}",
}
CAUTIOUS = {"iteration": 1, "cautious": True}
STREAM = (*stream(1, 3), "checkpoint.keep_last=3")


def kl(placement: str, coefficient: float) -> str:
    return f"algorithm.kl={{placement: {placement}, coefficient: {coefficient}}}"


def named(name: str, *overrides: str, **step: Any) -> dict[str, Any]:
    """A step of `Runs.train_here`: a run of this name."""
    return {"overrides": [*KEEPING, f"name={name}", *overrides], **step}


@pytest.fixture(scope="module")
def story(module_runs: Runs) -> Runs:
    """Runs to which all of it happens, one after another in one process."""
    alone = {"alone": "alone", "decisions": [BACK]}
    steps = [
        named("run", decisions=[BACK]),
        {"fork": ["run", "0", "early"]},
        named("alone", fault="reward.before@2=raise"),
        *[alone] * 3,
        named("stop", "iterations=2", decisions=[STOP]),
        named("stop", "iterations=2"),
        named("stop", "iterations=2", "update.learning_rate=5e-4"),
        {"overrides": [*STREAM, "name=stream"], "decisions": [BACK]},
    ]
    endings = module_runs.train_here(*steps)
    failed = {number: each for number, each in enumerate(endings) if each is not None}
    assert sorted(failed) == [2, 6, 7], failed
    assert failed[6] == failed[7]
    (module_runs.directory / "stopped.txt").write_text(str(failed[6]))
    return module_runs


def branches(runs: Runs, name: str = "run") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read_record(runs.run(name)).get("branches", [])
    return found


def prompts(runs: Runs, iteration: int, name: str = "run") -> set[int]:
    path = runs.run(name) / "iterations" / f"{iteration:06d}" / "episodes.parquet"
    return {each["prompt_id"] for each in read_episodes(path, None)}


def weights(runs: Runs, name: str = "run") -> list[str]:
    iterations = [int(line["iteration"]) for line in runs.metrics(name)]
    return [runs.weights(k, name) for k in iterations]


def test_a_return_plays_otherwise_in_a_branch_and_leaves_prompts_out(
    story: Runs, undisturbed: Callable[..., Runs]
) -> None:
    plain, (branch,) = undisturbed(), branches(story)
    assert (branch["number"], branch["after"], branch["from_iteration"]) == (1, 0, 2)
    assert (branch["kinds"], branch["pending"]) == (["reward_shift"], False)
    assert branch["left_out"] == [["", 5]]
    aside = story.run() / branch["set_aside"]
    assert sorted(path.name for path in (aside / "iterations").iterdir()) == ["000001", "000002"]
    assert (aside / "iterations" / "000002" / "advantage.json").is_file()
    assert story.weights(0) == plain.weights(0)
    assert story.weights(1) != plain.weights(1)
    assert prompts(plain, 1) == {4, 5, 6, 7}
    assert prompts(story, 1) == {4, 6, 7, 8}
    assert prompts(story, 2) == {9, 10, 11, 12}
    story.assert_learnt()
    assert [line["iteration"] for line in story.metrics()] == [0, 1, 2]
    assert story.shared_memory() == []


async def test_a_probe_of_a_branch_is_replayed_with_the_seeds_of_the_branch(
    story: Runs, tmp_path: Path
) -> None:
    record, found = read_record(story.run()), []
    pools = EnvironmentPools(tmp_path / "log", tmp_path / "record.json", here=True)
    config = load_config(story.run() / "config.yaml", [])
    await pools.start(config.played[""], 4)
    try:
        for branches in (Branches.of(record), Branches()):
            file = story.run() / "iterations" / "000002" / "episodes.parquet"
            probe = draw_probe(file, config.seed, branches)
            asked = Probed("", {"environment": probe})
            found.append(await pools.replay(config.played, asked))
    finally:
        await pools.close()
    assert found[0].asked["environment"] > 8
    assert found[0].otherwise == {}
    # Others are of other games.
    assert found[1].otherwise


def test_people_see_the_branch(story: Runs) -> None:
    found = {row["run"]: row["branch"] for row in run_states(story.directory / "runs")}
    assert (found["run"], found["stop"]) == (1, None)
    assert summarize(story.run()).branch == 1


def test_forks_go_on_in_the_branch_of_their_checkpoint(story: Runs) -> None:
    (branch,) = branches(story, "early")
    assert (branch["number"], branch["set_aside"]) == (1, "")
    assert story.weights(2, "early") == story.weights(2)
    assert "rollout" not in [stage for _, stage in story.executed("started", "early")]


def test_an_iteration_by_itself_returns_and_the_next_goes_on(story: Runs) -> None:
    """It ends without an error, and what it began is done when it has ended."""
    assert [each["pending"] for each in branches(story, "alone")] == [False]
    assert weights(story, "alone") == weights(story)


def test_a_stop_says_why_and_goes_on_when_settings_have_changed(story: Runs) -> None:
    said = (story.directory / "stopped.txt").read_text()
    assert "iteration 1, before its update: the run went back three times" in said
    assert said.count(TOLD) == 1
    assert "earl resume" in said
    # The advantages of iteration 1 were made once.
    assert story.executed("sealed", "stop").count((1, "advantage")) == 1
    story.assert_learnt("stop")


@pytest.mark.parametrize("placement", ["loss", pytest.param("reward", marks=pytest.mark.slow)])
def test_a_cautious_update_has_a_lower_rate_and_a_higher_penalty(
    runs: Runs, undisturbed: Callable[..., Runs], placement: str
) -> None:
    """As a run of those settings from there on; and nothing else is another one's."""
    short, before = "iterations=2", kl(placement, 0.01)
    endings = runs.train_here(
        named("run", short, before, decisions=[CAUTIOUS]),
        named("hand", short, before, fault="reward.before@1=raise"),
        named("hand", short, "update.learning_rate=3e-4", kl(placement, 0.03)),
    )
    assert (endings[0], endings[2]) == (None, None)
    careful = weights(runs)
    assert careful == weights(runs, "hand")
    if placement == "loss":
        plain = undisturbed()
        assert careful[0] == plain.weights(0)
        assert careful[1] != plain.weights(1)
    lines = runs.metrics()
    assert [line["guard/cautious"] for line in lines] == [0.0, 1.0]
    assert lines[1]["update/learning_rate"] == 3e-4
    (line,) = [each for each in runs.ledger() if each["event"].startswith("cautious")]
    assert line["event"].endswith("the learning rate is x 0.3, the KL coefficient x 3")
    runs.assert_learnt()


@pytest.mark.slow
def test_a_critic_keeps_its_learning_rate_in_a_cautious_iteration(runs: Runs) -> None:
    critic = ("algorithm={advantage: gae}", "critic={learning_rate: 0.001}")
    assert runs.train_here(named("run", "iterations=2", *critic, decisions=[CAUTIOUS])) == [None]
    lines = runs.metrics()
    assert [line["guard/cautious"] for line in lines] == [0.0, 1.0]
    assert [line["critic/learning_rate"] for line in lines] == [1e-3, 1e-3]
    assert [line["update/learning_rate"] for line in lines] == [1e-3, 3e-4]
    assert min(line["critic/grad_norm"] for line in lines) > 0


def test_a_return_that_is_killed_twice_ends_with_the_same_bits(runs: Runs, story: Runs) -> None:
    """In the middle of moving things, and when all is moved and nothing says so."""
    runs.environment["EARL_TEST_DECISIONS"] = json.dumps([BACK])
    runs.train(*KEEPING, fault="aside.iterations@2=kill", expect=KILLED)
    assert branches(runs)[0]["pending"]
    assert (runs.run() / "iterations" / "000002" / "advantage.json").is_file()
    runs.train(*KEEPING, fault="return.moved@2=kill", expect=KILLED)
    assert branches(runs)[0]["pending"]
    runs.train(*KEEPING)
    assert [each["pending"] for each in branches(runs)] == [False]
    assert weights(runs) == weights(story)
    runs.assert_learnt()
    assert runs.shared_memory() == []


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
    gate = runs.directory / "gate"
    gate.touch()
    runs.environment["EARL_FAULT_GATE"] = str(gate)
    process = runs.start(*beside, fault="advantage.before@2=wait;return.noted@2=kill")
    deadline = time.monotonic() + 240
    while (3, "rollout") not in runs.executed("sealed"):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    gate.unlink()
    process.wait(300)
    assert process.returncode == KILLED
    runs.wait_for_workers_to_end()
    runs.train(*beside)
    assert [each["after"] for each in branches(runs)] == [0]
    assert [runs.weights(k) for k in range(4)] == [runs.weights(k, "turn") for k in range(4)]
    aside = runs.run() / branches(runs)[0]["set_aside"] / "iterations"
    assert {path.name for path in aside.iterdir()} == {"000001", "000002", "000003"}
    runs.assert_learnt()
    assert runs.shared_memory() == []


def test_groups_of_a_stream_are_played_anew_in_a_branch(story: Runs) -> None:
    (branch,) = branches(story, "stream")
    assert (story.run("stream") / branch["set_aside"] / "groups.jsonl").is_file()
    assert [prompts(story, k, "stream") for k in (1, 2)] == [{4, 6, 7, 8}, {9, 10, 11, 12}]
    story.assert_learnt("stream")


@pytest.mark.campaign
def test_a_stream_that_is_killed_while_it_goes_back_ends_with_the_same_bits(runs: Runs) -> None:
    runs.environment |= {"EARL_TEST_DECISIONS": json.dumps([BACK]), "EARL_CLOCK": "4"}
    runs.train(*STREAM, "name=whole")
    runs.train(*STREAM, fault="return.begun@2=kill", expect=KILLED)
    runs.wait_for_workers_to_end()
    runs.train(*STREAM)
    for name in ("run", "whole"):
        assert len(branches(runs, name)) == 1
        runs.assert_learnt(name)
    assert weights(runs) == weights(runs, "whole")
    assert runs.shared_memory() == []


@pytest.mark.slow
def test_a_function_that_stays_wrong_is_gone_back_from_three_times_and_then_stops(
    runs: Runs,
) -> None:
    """Found by what it says of episodes that it has scored before."""
    (ending,) = runs.train_here(
        {"overrides": ["guard=act", "iterations=9", *turning("run", 1.0, "flipped")]}
    )
    found = branches(runs)
    assert [each["number"] for each in found] == [1, 2, 3]
    (after,) = {each["after"] for each in found}
    assert 0 <= after < BEGINS
    assert all("probe_reward" in each["kinds"] for each in found)
    assert "went back 3 times" in str(ending)
    assert sorted(path.name for path in (runs.run() / "set_aside").iterdir()) == ["1", "2", "3"]
    returns = [line["reward/mean"] for line in runs.metrics()]
    assert len(returns) > after
