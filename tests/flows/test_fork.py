"""Forks: runs that go on after another one's checkpoint, and play nothing again that holds."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from earl_core.config import ConfigError
from earl_core.control.fork_plan import ForkPlan
from earl_core.run.record import OtherFormat, lineage_names, read_record, write_record
from earl_core.system.errors import EarlError
from flows.api import Run
from flows.cli.found_runs import find_run
from tests.flows.runs import KILLED, Runs

KEPT = ["iterations=3", "checkpoint.keep_last=3"]
RATE = "update.learning_rate=5e-3"
REWARD = "reward.environment_weight=2.0"


@pytest.fixture(scope="module")
def story(module_runs: Runs) -> Runs:
    """A run of three iterations; what became of it under another rate after the first; three forks
    of its first checkpoint, the first of which was trained to its end."""
    runs = module_runs
    assert runs.train_here({"overrides": KEPT}) == [None]
    shutil.copytree(runs.run(), runs.run("kept"))
    steps = [
        {"fork": ["run", "0", "same"]},
        {"fork": ["run", "0", "rate"], "overrides": [RATE]},
        {"fork": ["run", "0", "reward"], "overrides": [REWARD]},
        {"fork": ["same", "1", "again"]},
        {"overrides": [*KEPT, RATE], "go_back": 0},
    ]
    assert runs.train_here(*steps) == [None] * len(steps)
    return runs


def played(runs: Runs, name: str, stage: str = "rollout") -> list[int]:
    """Iterations whose stage the fork itself has done."""
    return [k for k, found in runs.executed("started", name) if found == stage]


def test_a_fork_without_changes_plays_nothing_and_ends_with_its_parents_bits(story: Runs) -> None:
    story.assert_learnt("same")
    assert played(story, "same") == played(story, "same", "reward") == []
    assert played(story, "same", "update") == [1, 2]
    parent = story.weights(2, "kept")
    assert story.weights(2, "same") == story.weights(2, "again") == parent
    assert played(story, "again") == []
    assert [line["iteration"] for line in story.metrics("same")] == [0, 1, 2]
    assert lineage_names(read_record(story.run("again"))) == ["same@1", "run@0"]
    assert not (story.run("same") / "inherited").exists()
    probes = [(story.run(name) / "probe.json").read_bytes() for name in ("same", "again")]
    assert probes[0] == probes[1], "what was answered before is not forgotten"


def test_other_updates_repeat_no_rollout_and_are_those_of_a_run_set_so_from_there(
    story: Runs,
) -> None:
    assert played(story, "rate") == [2], "that of iteration 1 was played before the change"
    assert played(story, "rate", "reward") == [2]
    assert story.weights(2, "rate") == story.weights(2)
    assert story.weights(2, "rate") != story.weights(2, "kept")


def test_other_rewards_score_the_rollout_that_exists(story: Runs) -> None:
    assert played(story, "reward") == [2]
    assert played(story, "reward", "reward") == [1, 2]
    means = [[line["reward/mean"] for line in story.metrics(name)] for name in ("reward", "kept")]
    assert means[0][1] == pytest.approx(2 * means[1][1]), "the same episodes"


def test_a_fork_needs_nothing_of_its_parent_once_it_is_made(story: Runs) -> None:
    plan = ForkPlan.of(story.run("kept"), "1", "orphan")
    assert plan.told == ("iteration 2: rollout and reward taken over, the rest done again",)
    plan.make()
    away = story.directory / "away"
    os.rename(story.run("kept"), away)
    try:
        assert story.train_here({"overrides": ["name=orphan", *KEPT]}) == [None]
    finally:
        os.rename(away, story.run("kept"))
    assert played(story, "orphan") == []
    assert story.weights(2, "orphan") == story.weights(2, "kept")


def test_what_a_killed_fork_leaves_is_no_run_and_in_nobodys_way(
    story: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ForkPlan.of(story.run("kept"), "last", "cut", ["iterations=4"])
    monkeypatch.setenv("EARL_FAULT", "fork.made@2=kill")
    if (child := os.fork()) == 0:
        plan.make()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED
    assert len([*story.run("").glob(".forks/cut.*/run.json")]) == 1
    assert "cut" not in [each.parent.name for each in story.run("").glob("*/config.yaml")]
    monkeypatch.delenv("EARL_FAULT")
    plan.make()
    assert read_record(story.run("cut"))["attempts"] == 0
    assert len([*story.run("").glob(".forks/cut.*")]) == 1, "what is not ours to judge stays"


@pytest.mark.parametrize(
    ("which", "name", "overrides", "why"),
    [
        ("7", "new", [], "no whole checkpoint 7 .it has 0, 1, 2.: name one of them$"),
        ("²", "new", [], "`last`, `best`, or the number of an iteration, not '²'"),
        ("0", "new", ["name=other"], "name=other is no setting of a fork"),
        ("initial", "new", [], "before the first iteration there is none"),
        ("0", "same", [], "exists already: choose another name for the fork"),
        ("2", "new", [], "nothing is left to do: iterations is 3"),
        ("0", "new", ["model.path=elsewhere"], "model.path differs from that of kept"),
        ("0", "new", ["no.such=1"], "unknown key"),
        ("0", "new", ["algorithm.advantage=gae", "critic={}"], "has no state of the critic"),
    ],
)
def test_bad_forks_are_refused_in_a_sentence(
    which: str, name: str, overrides: list[str], why: str, story: Runs
) -> None:
    before = sorted(story.run("").iterdir())
    with pytest.raises(ConfigError, match=why):
        ForkPlan.of(story.run("kept"), which, name, overrides)
    assert sorted(story.run("").iterdir()) == before


def test_what_is_not_made_leaves_nothing(
    story: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ForkPlan.of(story.run("kept"), "last", "half", ["iterations=4"])
    monkeypatch.setenv("EARL_FAULT", "fork.made@2=raise")
    with pytest.raises(Exception, match="injected failure"):
        plan.make()
    assert not [*story.run("").glob(".forks/half.*")]
    monkeypatch.delenv("EARL_FAULT")
    parent = shutil.copytree(story.run("kept"), tmp_path / "kept")
    for seal in parent.glob("iterations/000002/*.json"):
        seal.unlink()
    made = ForkPlan.of(parent, "1", "new").make()
    assert not [*made.glob("inherited/*")], "rows that no seal tells of"


@pytest.mark.parametrize("damage", ["checkpoint", "format", "record"])
def test_damaged_parents_are_refused(damage: str, story: Runs, tmp_path: Path) -> None:
    parent = tmp_path / "kept"
    shutil.copytree(story.run("kept"), parent)
    if damage == "checkpoint":
        weights = parent / "checkpoints/000000/policy/model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    elif damage == "record":
        (parent / "run.json").unlink()
    else:
        record = {**read_record(parent), "format": "earl.run/3"}
        write_record(parent, record)
    with pytest.raises(EarlError, match=r"000000 is damaged|earl\.run/3|has no run.json") as found:
        ForkPlan.of(parent, "0", "new", [])
    assert isinstance(found.value, OtherFormat) == (damage == "format")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("runs", ["runs #2", "2024", "[a]: b"])
def test_a_fork_lies_beside_its_parent_whatever_that_is_called(
    runs: str, story: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(story.run("kept"), tmp_path / runs / "kept", copy_function=os.link)
    monkeypatch.chdir(tmp_path)
    plan = ForkPlan.of(Path(runs, "kept"), "0", "new")
    assert plan.settings.runs_directory == runs
    for told, here in ((".", "kept"), ("..", "kept/iterations")):
        monkeypatch.chdir(tmp_path / runs / here)
        assert find_run(told, "runs").parent == tmp_path / runs


def test_a_fork_is_made_from_python(story: Runs) -> None:
    made = Run.open(story.run("kept")).fork("api", {"update.learning_rate": 5e-3}, at=0)
    assert made.directory == story.run("api")
    assert made.config.update.learning_rate == 5e-3
    assert [each.number for each in made.iterations] == [0]
