"""Recorded episodes that sources of rewards are asked for again."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from earl_core.config.environment import EnvironmentConfig
from earl_core.control.guard_probe import probe_findings, probed_environments
from earl_core.dispatch import Manifest
from earl_core.environments.base import Message, StepResult
from earl_core.environments.hosting.pool import EnvironmentPool
from earl_core.experience.probe import (
    ASKED,
    PROBE,
    SIZE,
    STEADY,
    Asked,
    Probe,
    Probed,
    ProbedEpisode,
    probed_episodes,
    score_difference,
)
from earl_core.rollout.environment_pools import EnvironmentPools
from earl_core.run import RunDirectory
from earl_core.secrets.redactor import HIDDEN
from earl_core.system.processes import host_name
from tests.run.test_episode_export import kept
from tests.run.test_run_directory import config_in


class Echo:
    """Says each text again, and pays its length; once a file exists, a point more for some."""

    return_range = (0.0, 100.0)

    def __init__(self, poisoned: str, chance: bool = False) -> None:
        self._poisoned, self._chance, self._prompt = Path(poisoned), chance, 0

    def reset(self, prompt: int, seed: int) -> list[Message]:
        self._prompt, self._left = prompt, 2
        return [{"role": "user", "content": f"{prompt} {seed}"}]

    def step(self, text: str) -> StepResult:
        self._left -= 1
        wrong = self._poisoned.exists() and self._prompt % 5 == 0
        reward = len(text) + float(wrong)
        return StepResult([{"role": "user", "content": text}], reward, self._left == 0)

    def close(self) -> None:
        pass


NAME = "tests.experience.test_probe:Echo"


def probed(number: int, answers: Sequence[str] = ("a", "bc")) -> ProbedEpisode:
    said = [f"{number} 7", answers[0]]
    messages = []
    for observation, answer in zip(said, answers, strict=True):
        messages.append({"role": "user", "content": observation})
        messages.append({"role": "assistant", "content": answer})
    episode = {
        "episode_id": number,
        "prompt_id": number,
        "environment": "",
        "messages": messages,
        "closing": answers[-1],
        "turn_rewards": [float(len(answer)) for answer in answers],
    }
    return ProbedEpisode(episode=episode, scores={"f": 0.5}, seed=7)


def test_a_probe_is_asked_for_whole_and_then_in_turn(tmp_path: Path) -> None:
    probe = Probe(settings="", episodes=[probed(number) for number in range(SIZE)])
    assert probe.places("environment", 3, 256) == list(range(SIZE))
    known = {"settled": ["environment", "function f"], "off": ["function g"]}
    settled = probe.model_copy(update={**known, "slow": ["environment"]})
    assert settled.places("function g", 3, 256) == []
    turns = [settled.places("function f", iteration, 16) for iteration in range(4)]
    assert {len(each) for each in turns} == {ASKED}
    assert sorted(place for each in turns for place in each) == list(range(SIZE))
    # A slow one costs at most a sixteenth of what is played.
    assert [len(settled.places("environment", 3, n)) for n in (8, 64, 10**6)] == [1, 4, ASKED]
    settled.write(tmp_path)
    assert Probe.read(tmp_path) == settled
    found = probed_episodes(tmp_path, {"function f": [3, 1, 99]})
    assert [each.episode["episode_id"] for each in found.episodes["function f"]] == [3, 1]
    path = tmp_path / "probe.json"
    path.write_bytes(path.read_bytes().replace(b'"seed":7', b'"seed":8', 1))
    assert Probe.read(tmp_path) is None
    path.write_text("[]")
    assert Probe.read(tmp_path) is None


def test_what_answers_otherwise_the_first_time_is_not_judged_whenever_that_is() -> None:
    """An environment may be played for the first time long after a function was asked."""
    probe = Probe(settings="", episodes=[probed(0)])
    first = Asked(asked={"function f": 1, "function g": 1}, otherwise={"function g": [(0, "2")]})
    probe, told = probe.after([first], 3)
    assert (probe.settled, probe.unsteady) == (["function f", "function g"], {"function g": 3})
    assert told["function g"].startswith("answers 1 of 1 recorded episodes otherwise than a moment")
    later = Asked(asked={"environment": 1, "function f": 1})
    later.add("environment", 4, "another observation")
    later.add("function f", 4, "1, and was 0")
    probe, told = probe.after([later], 5)
    assert list(told) == ["environment"]
    # The function was known to answer the same: it has changed.
    assert probe.unsteady == {"environment": 5, "function g": 3}
    assert probe.after([later], 5) == (probe, {})
    silent, told = probe.after([Asked(silent=["function f"])], 6)
    assert silent.places("function f", 9, 64) == []
    assert told == {
        "function f": "gives no answer, and takes long: changes in it cannot be noticed"
    }


def test_a_source_that_was_wrong_when_it_was_asked_first_is_judged_when_it_is_right() -> None:
    probe = Probe(settings="", episodes=[probed(number) for number in range(SIZE)])
    wrong = Asked(asked={"function f": ASKED}, otherwise={"function f": [(0, "1, and was 0")]})
    right, judged = Asked(asked={"function f": ASKED}), []
    for iteration in range(40):
        assert probe.places("function f", iteration, 64)
        answers = wrong if iteration in (0, 1, 2, 8, 30) else right
        probe, told = probe.after([answers], iteration)
        assert probe.after([answers], iteration) == (probe, {}), "a resumed run judges it again"
        assert bool(told) == (iteration in (0, 8 + STEADY))
        if "function f" not in probe.unsteady:
            judged.append(iteration)
    # It has changed in iteration 30, which is a finding.
    assert judged == list(range(8 + STEADY, 40))


async def test_a_host_that_does_not_see_the_probe_is_told_of_once(
    pools: EnvironmentPools, tmp_path: Path
) -> None:
    with closing(RunDirectory.open(config_in(tmp_path))) as run:
        controller: Any = SimpleNamespace(run=run, guard_faults=set())
        Probe(settings="", episodes=[probed(0)]).write(run.path)
        found = []
        for place in (run.path, tmp_path / "not mounted"):
            asked = await pools.replay({}, probed_episodes(place, {"environment": [0]}))
            found.append(asked.unread)
            sealed = {
                stage: Manifest(
                    **{"run": run.uid, "iteration": 1, "key": "k", "policy_version": 1},
                    stage=stage,
                    outputs={PROBE: asked.model_dump(mode="json")} if stage == "rollout" else {},
                )
                for stage in ("rollout", "reward")
            }
            for _ in range(2):
                assert probe_findings(controller, 1, sealed) == []
        assert found == ["", host_name()]
        (line,) = [each["event"] for each in run.ledger() if each["stage"] == "guard"]
        assert f"could not look at recorded episodes on host {host_name()}" in line


def test_a_run_that_has_no_probe_says_so_once(tmp_path: Path) -> None:
    """A probe holds no secrets, which all that was kept may have."""
    with closing(RunDirectory.open(config_in(tmp_path))) as run:
        controller: Any = SimpleNamespace(run=run, config=run.config, guard_faults=set())
        assert probed_environments(controller, 0) == {}
        kept(run.path, [{"texts": [f"pay {HIDDEN}", "yes", ""], "turns": 1}])
        for iteration in (4, 5):
            assert probed_environments(controller, iteration) == {}
        (line,) = [each["event"] for each in run.ledger() if each["stage"] == "guard"]
        assert "could not look at its probe" in line
        assert "episodes.parquet holds no episode without a secret" in line


def test_scores_are_equal_to_a_millionth() -> None:
    assert score_difference(0.1, 0.1 + 1e-9) == ""
    assert score_difference(1e6, 1e6 + 0.1) == ""
    assert score_difference(0.5, -0.5) == "-0.5, and was 0.5"
    # Episodes of the iteration leave their groups for these, which is enough.
    assert score_difference(0.5, None) == score_difference(0.5, 1e30) == ""
    assert score_difference(0.5, 2.0, (0.0, 1.0)) == ""


@pytest.fixture
def pools(tmp_path: Path) -> EnvironmentPools:
    return EnvironmentPools(tmp_path / "log", tmp_path / "record.json", here=True)


async def asked(pools: EnvironmentPools, environment: EnvironmentConfig) -> Asked:
    await pools.start(environment, 4)
    episodes = [probed(number) for number in range(10)]
    return await pools.replay({"": environment}, Probed("a", {"environment": episodes}))


async def test_environments_replay_what_was_recorded(
    pools: EnvironmentPools, tmp_path: Path
) -> None:
    poisoned = tmp_path / "poisoned"
    options = {"poisoned": str(poisoned)}
    environment = EnvironmentConfig(name=NAME, options=options)
    try:
        clean = await asked(pools, environment)
        assert clean.asked == {"environment": 10}
        assert clean.otherwise == {}
        poisoned.touch()
        found = await asked(pools, environment)
        told = dict(found.otherwise["environment"])
        assert told.keys() == {0, 5}
        assert told[0] == "turn 1 is paid 2, and was 1"
        other = await pools.replay(
            {"": environment}, Probed("a", {"environment": [probed(3, ("a", "b")), probed(1)]})
        )
        assert other.otherwise == {}
        # What says that it cannot be replayed is not asked.
        changing = EnvironmentConfig(name=NAME, options=options, deterministic=False)
        assert (await asked(pools, changing)).asked == {}
    finally:
        await pools.close()


class Rare:
    """Counts how many there are at a time; without a file each answer raises, and late."""

    standing, most = 0, 0

    def __init__(self, works: str) -> None:
        self._works = Path(works)
        Rare.standing += 1
        Rare.most = max(Rare.most, Rare.standing)

    async def reset(self, prompt: int, seed: int) -> list[Message]:
        return [{"role": "user", "content": f"{prompt} {seed}"}]

    async def step(self, text: str) -> StepResult:
        await asyncio.sleep(0.05)
        if not self._works.exists():
            raise RuntimeError("no sandbox is left")
        return StepResult([], 1.0, True)

    async def close(self) -> None:
        Rare.standing -= 1


async def test_replays_are_no_more_at_a_time_than_episodes_and_failing_ones_are_told(
    pools: EnvironmentPools, tmp_path: Path
) -> None:
    works = tmp_path / "works"
    options = {"works": str(works)}
    environment = EnvironmentConfig(name="tests.experience.test_probe:Rare", options=options)
    await pools.start(environment, 4)
    given = {"": environment}, Probed("a", {"environment": [probed(n) for n in range(6)]}), 2
    try:
        broken = await pools.replay(*given)
        assert (broken.asked, broken.otherwise, broken.silent) == ({}, {}, ["environment"])
        works.touch()
        found = await pools.replay(*given)
    finally:
        await pools.close()
    assert (found.of, found.asked, found.silent) == ("a", {"environment": 6}, [])
    assert sys.modules["tests.experience.test_probe"].Rare.most == 2


async def test_what_cannot_be_asked_costs_no_iteration(pools: EnvironmentPools) -> None:
    environment = EnvironmentConfig(name=NAME, options={"poisoned": "x"})
    await pools.start(environment, 4)
    odd = ProbedEpisode(episode={"environment": "", "messages": [{}]}, scores={}, seed=7)
    try:
        found = await pools.replay({"": environment}, Probed("a", {"environment": [odd]}))
    finally:
        await pools.close()
    assert found.asked == {}


async def test_ranges_are_what_sources_declare(tmp_path: Path) -> None:
    wrong = {"into": "nan", "begins": 1, "of_iteration": 1, "run": "", "share": 0.2}
    of = "tests.experience.scoring_functions"
    functions = [
        {"label": "declared", "function": f"{of}:turning", "options": wrong},
        {"label": "silent", "function": f"{of}:letters", "options": {}},
    ]
    for name, options, ranges in (
        (NAME, {"poisoned": str(tmp_path)}, {"": [0.0, 100.0]}),
        ("tic_tac_toe", {}, {"": [-1.5, 1.0]}),
        ("reward functions", {"functions": functions, "timeout_seconds": 5.0},
         {"declared": [-8.0, 8.0]}),
    ):  # fmt: skip
        pool = EnvironmentPool(name, options, here=True)
        await pool.start()
        assert pool.ranges == ranges
        await pool.stop()
