"""Reward functions: their scores, against plain Python; and what failures cost."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from earl_core.algorithms.moments import merge_statistics
from earl_core.cluster.rank_process import WorkerContext
from earl_core.cluster.rpc import merge_results
from earl_core.config import RunConfig
from earl_core.dispatch import Batch, Manifest, ShardEntry, ShardStore
from earl_core.environments.hosting.check import check_environments
from earl_core.experience.advantage import ADVANTAGE_RULES
from earl_core.experience.experience_worker import ExperienceWorker
from earl_core.experience.group_returns import GroupReturns
from earl_core.experience.reward import merge_rewards, reward_rows
from earl_core.experience.scoring import Scorer, Scores, scored_episodes
from earl_core.run import RunDirectory
from earl_core.system.errors import Cancelled, ConfigError, EarlError
from earl_core.trajectory.samples import Episode, Sample, VersionSpan, rollout_rows
from earl_core.trajectory.schema import ROLLOUT_SCHEMA, SAMPLE_BITS
from tests.experience.test_distributed import Ranks, configuration, sealed, written

HERE = "tests.experience.scoring_functions"
BRIEF = {"function": f"{HERE}:brief", "weight": -0.5, "options": {"most": 10}}
RIGHT = {"function": f"{HERE}:right", "label": "truth", "weight": 2.0}
BY_NUMBER = {"function": f"{HERE}:by_number"}
SEVERAL = {
    "functions": [BRIEF, RIGHT, BY_NUMBER],
    "environment_weight": 0.5,
    "retries": 0,
    "timeout_seconds": 0.5,
    "max_failed_share": 0.65,
}


def told(number: int, group: int) -> Episode:
    """Two turns in two samples, whose answers are ever longer."""
    samples = []
    for turn in range(2):
        sample = Sample()
        sample.begin_turn([1, 2], f"question {turn}")
        sample.answer(
            [3, 4], [-0.5, -0.25], [VersionSpan(0, 0, 2)], "x" * number if turn else "yes"
        )
        sample.turn_rewards[-1] = float(number % 3) if turn else 1.0
        samples.append(sample)
    samples[-1].texts.append("the end")
    info: dict[str, object] = {"outcome": "win", "scoring": {"answer": "xx"}}
    return Episode(number, group, 7, samples, "done", info)


EPISODES = [told(number, number // 4) for number in range(10)]


def rolled_out(store: ShardStore) -> Manifest:
    return written(store, "rollout", ROLLOUT_SCHEMA, [rollout_rows(EPISODES)])


def scores_of(
    tmp_path: Path, functions: list[dict[str, Any]], episodes: int = 10, **settings: Any
) -> Scores:
    """What one rank's functions give for the first episodes."""
    reward = {"retries": 0, "max_failed_share": 1.0, **settings, "functions": functions}
    store = ShardStore(tmp_path / "shm", 2**30)
    with Batch(store, [rolled_out(store)]) as batch:
        given = scored_episodes(batch)[:episodes]
    return asyncio.run(_scores(configuration(tmp_path, reward), given, tmp_path / "rank.log"))


async def _scores(config: RunConfig, episodes: list[dict[str, Any]], log: Path) -> Scores:
    scorer = Scorer(config, log, log.parent)
    try:
        return await scorer.score(episodes, 10)
    finally:
        await scorer.close()


def test_functions_get_the_whole_episode(tmp_path: Path) -> None:
    store = ShardStore(tmp_path, 2**30)
    with Batch(store, [rolled_out(store)]) as batch:
        episodes = scored_episodes(batch)
    assert len(episodes) == 10
    assert episodes[5] == {
        "episode_id": 5,
        "group_id": 1,
        "prompt_id": 7,
        "environment": "",
        "finish_reason": "done",
        "outcome": "win",
        "messages": [
            {"role": "user", "content": "question 0"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "question 1"},
            {"role": "assistant", "content": "xxxxx"},
        ],
        "closing": "the end",
        "turns": 2,
        "turn_rewards": [1.0, 2.0],
        "reward": 3.0,
        "scoring": {"answer": "xx"},
    }


def test_held_out_episodes_are_rated_as_the_stage_does(tmp_path: Path) -> None:
    config = configuration(tmp_path, SEVERAL)
    store = ShardStore(tmp_path / "shm", 2**30)
    episodes = deepcopy(EPISODES)

    async def rated() -> Scores:
        scorer = Scorer(config, tmp_path / "rank.log", tmp_path)
        try:
            await scorer.rate(episodes, 10)
            with Batch(store, [rolled_out(store)]) as batch:
                return await scorer.score(scored_episodes(batch), 10)
        finally:
            await scorer.close()

    scores = asyncio.run(rated())
    assert {each.episode_id for each in episodes if each.failed} == set(scores.failures)
    assert scores.failures
    with Batch(store, [rolled_out(store)]) as batch:
        found: Any = reward_rows(batch, config.reward, scores.given)
    rows = found[0]
    numbers = (rows.numbers["sample_id"] >> SAMPLE_BITS).tolist()
    totals = dict(zip(numbers, rows.numbers["reward"].tolist(), strict=True))
    kept = {each.episode_id: each.total_reward for each in episodes if not each.failed}
    assert kept == pytest.approx(totals)


def test_three_ranks_weigh_scores_and_leave_out_what_failed(tmp_path: Path) -> None:
    config = configuration(tmp_path, SEVERAL, advantage="turn_returns")
    ranks = Ranks(tmp_path, config)
    try:
        rollout = rolled_out(ranks.store)
        merged = merge_rewards(ranks.call("reward", [rollout]), config)
        rewards = sealed("reward", [ShardEntry.model_validate(e) for e in merged["shards"]])
        with Batch(ranks.store, [rewards]) as batch:
            scores = map(json.loads, batch.strings("scores"))
            totals = [row.tolist() for row in batch.list_rows("turn_totals")]
            columns = zip(batch.scalars("reward").tolist(), scores, totals, strict=True)
            found = dict(zip(batch.rows.tolist(), columns, strict=True))
        statistics = merge_statistics(ranks.call("advantage_statistics", [rollout, rewards]))
        results = ranks.call("advantage", [rollout, rewards], statistics=statistics)
        judged = merge_results(results, ADVANTAGE_RULES)
        entries = [ShardEntry.model_validate(entry) for entry in judged["shards"]]
        with Batch(ranks.store, [sealed("advantage", entries)]) as batch:
            rows = [row.tolist() for row in batch.list_rows("advantages")]
            advantages = dict(zip(batch.rows.tolist(), rows, strict=True))
    finally:
        ranks.close()
    left = (0, 7, 8, 9)
    brief = {number: max(0.0, 1 - (3 + number) / 10) for number in left}
    added = {number: -0.5 * brief[number] + 0.25 for number in left}
    second = {number: 0.5 * (number % 3) + added[number] for number in left}
    expected = {number: 0.5 + second[number] for number in left}
    rows = [number << 16 | sample for number in left for sample in (0, 1)]
    assert sorted(found) == rows
    for row in rows:
        number, sample = row >> 16, row & 1
        assert found[row][0] == pytest.approx(expected[number], abs=1e-7)
        assert found[row][1] == {"brief": brief[number], "truth": 0.0, "by_number": 0.25}
        assert found[row][2] == [pytest.approx(second[number] if sample else 0.5, abs=1e-7)]
    metrics = merged["metrics"]
    assert metrics["episodes_failed"] == 6
    assert metrics["mean"] == pytest.approx(np.mean(list(expected.values())))
    assert metrics["std"] == pytest.approx(np.std(list(expected.values())))
    assert metrics["of/brief/mean"] == pytest.approx(np.mean(list(brief.values())))
    assert metrics["of/brief/std"] == pytest.approx(np.std(list(brief.values())))
    assert metrics["of/brief/letters"] == 9.0
    assert metrics["of/truth/mean"] == 0.0
    assert "of/brief/note" not in metrics
    # Two groups have one episode left, and are dropped; turn_returns says 2 (G_t - mean G_0).
    assert statistics["groups"] == 3
    assert judged["metrics"]["groups_dropped"] == judged["metrics"]["episodes_kept"] == 2
    baseline = (expected[8] + expected[9]) / 2
    for number in (8, 9):
        for sample, returns in enumerate((expected[number], second[number])):
            values = [0, 0, *[2 * (returns - baseline)] * 2]
            assert advantages[number << 16 | sample] == pytest.approx(values, abs=1e-6)
    assert len(advantages) == 4


def test_a_rank_alone_gives_the_same_scores_and_each_failure_costs_its_own(tmp_path: Path) -> None:
    found = scores_of(tmp_path, [RIGHT, BY_NUMBER], timeout_seconds=1.0)
    assert found.given == {number: {"truth": 0.0, "by_number": 0.25} for number in (0, 7, 8, 9)}
    assert {number: why.partition("\n")[0] for number, why in found.failures.items()} == {
        1: "by_number: exception: Traceback (most recent call last):",
        2: "by_number: invalid_result: The reward must be a finite number between -1e+30 and "
        "1e+30, not nan: scale it, or leave it out.",
        3: "by_number: invalid_result: The reward must be a finite number between -1e+30 and "
        "1e+30, not 'good': scale it, or leave it out.",
        4: "by_number: timeout: step took over 1 s, at:",
        5: "by_number: host_died: ",
        6: "by_number: timeout: step took over 1 s",
    }
    assert found.failures[1].endswith("ConnectionError: nobody there")


def test_functions_of_one_environment_of_several(tmp_path: Path) -> None:
    raw = configuration(tmp_path).model_dump() | {"environment": None}
    raw["environments"] = [{"name": "tic_tac_toe", "label": label} for label in ("a", "b")]
    raw["reward"] = {"functions": [{**RIGHT, "environments": ["b"]}, BY_NUMBER]}
    raw["reward"]["python"] = sys.executable
    config = RunConfig.model_validate(raw)
    store = ShardStore(tmp_path / "shm", 2**30)
    episodes = [replace(EPISODES[number], environment="ab"[number == 7]) for number in (0, 7)]
    rollout = written(store, "rollout", ROLLOUT_SCHEMA, [rollout_rows(episodes)])
    with Batch(store, [rollout]) as batch:
        found = asyncio.run(_scores(config, scored_episodes(batch), tmp_path / "rank.log"))
    assert found.given == {0: {"by_number": 0.25}, 7: {"truth": 0.0, "by_number": 0.25}}
    moments = found.tally().moments
    record = json.loads((tmp_path / "reward_functions.json").read_text())
    assert (record["interpreter"], record["numpy"]) == (sys.executable, np.__version__)
    assert {name: each.count for name, each in moments.items()} == {"by_number": 2, "truth": 1}
    raw["reward"]["environment_weight"] = 0
    raw["reward"]["functions"].pop()
    with pytest.raises(ValueError, match="no function has a weight in the environment 'a'"):
        RunConfig.model_validate(raw)


def test_a_curriculum_learns_from_the_whole_reward(tmp_path: Path) -> None:
    """Of what the environment gave, and of scores; a group that one rank alone rewards."""
    raw = configuration(tmp_path, SEVERAL | {"retries": 0}).model_dump() | {"environment": None}
    raw["environments"] = [{"name": "tic_tac_toe", "label": label} for label in ("a", "b")]
    raw["environments"][1]["curriculum"] = {"passing_reward": 0.9}
    raw["curriculum"] = {}
    raw["algorithm"]["advantage"] = "reinforce_plus_plus"
    config = RunConfig.model_validate(raw)
    episodes = [replace(each, environment="ab"[each.group_id == 2]) for each in EPISODES]
    ranks = Ranks(tmp_path, config)
    try:
        rollout = written(ranks.store, "rollout", ROLLOUT_SCHEMA, [rollout_rows(episodes)])
        results = ranks.call("reward", [rollout])
        merged = merge_rewards(results, config)
    finally:
        ranks.close()
    returns = {
        label: GroupReturns.model_validate(each)
        for label, each in merged["outputs"]["returns"].items()
    }
    assert sum(bool(result["returns"]) for result in results) > 1

    def reward(number: int) -> float:
        own = 1 + number % 3
        return 0.5 * own - 0.5 * max(0.0, 1 - (3 + number) / 10) + 0.25

    # The episodes 8 and 9 of row 7: rewards of 1.75 and 0.75.
    assert [reward(8), reward(9)] == pytest.approx([1.75, 0.75])
    assert merged["outputs"]["rows"] == {"b": [[7, 1, 2]]}
    # Of the groups 0 (a) and 1 (a) one episode each could be scored, of 2 (b) two.
    assert returns["a"].spreads.count == 0
    assert [returns["a"].span.low, returns["a"].span.high] == pytest.approx(
        sorted([reward(0), reward(7)])
    )
    assert returns["b"].spreads.count == 1
    assert returns["b"].spreads.mean == pytest.approx(abs(reward(8) - reward(9)) / 2)


@asynccontextmanager
async def rank_alone(
    tmp_path: Path, config: RunConfig
) -> AsyncIterator[tuple[RunDirectory, ExperienceWorker, WorkerContext]]:
    run = RunDirectory.open(config)
    context = WorkerContext(0, 1, "experience", tmp_path / "experience-0.log", stage="reward")
    worker = ExperienceWorker(
        context,
        {"stage": "experience"},
        config=config.model_dump(mode="json"),
        run_directory=str(run.path),
    )
    try:
        yield run, worker, context
    finally:
        await worker.close()
        run.finish()
        run.close()


async def test_scoring_ends_when_its_call_is_cancelled(tmp_path: Path) -> None:
    # It would end by nothing else: two of its functions never return.
    endless = {"functions": [BY_NUMBER], "max_failed_share": 0.65}
    config = configuration(tmp_path, endless)
    async with rank_alone(tmp_path, config) as (run, worker, context):
        rollout = run.seal(rolled_out(run.store)).model_dump(mode="json")
        scoring = asyncio.create_task(worker.reward([rollout]))
        await asyncio.sleep(0.1)
        context.cancelled.set()
        with pytest.raises(Cancelled, match="the reward was cancelled"):
            await scoring


async def test_what_failed_in_its_own_iteration_is_no_failure_of_later_ones(
    tmp_path: Path,
) -> None:
    """One of four episodes each time, beside which old ones are trained again: it is not asked for
    again, or, where the rewards of its own iteration are lost, does not count."""
    seen = tmp_path / "seen.txt"
    noted = {"function": f"{HERE}:turns", "options": {"seen": str(seen)}}
    limits = {"retries": 0, "max_failed_share": 0.3}
    config = configuration(tmp_path, {"functions": [noted, BY_NUMBER], **limits})

    async with rank_alone(tmp_path, config) as (run, worker, _):

        def shard(iteration: int, episodes: list[Episode]) -> ShardEntry:
            rows = rollout_rows(episodes)
            return run.store.publish(
                stage="collect", iteration=iteration, rank=0, schema=ROLLOUT_SCHEMA, rows=rows
            )

        def reference(stage: str, iteration: int, *shards: ShardEntry, **outputs: Any) -> Any:
            changes = {"run": run.uid, "iteration": iteration, "outputs": outputs}
            manifest = sealed(stage, list(shards)).model_copy(update=changes)
            return run.seal(manifest).model_dump(mode="json")

        old = shard(0, [told(number, number // 8) for number in (0, 1, 8, 9)])
        new = shard(1, [told(number, 4 + number // 8) for number in (2, 7, 10, 11)])
        home = await worker.reward([reference("collect", 0, old)])
        assert merge_rewards([home], config)["metrics"]["episodes_failed"] == 1
        entries = [ShardEntry.model_validate(entry) for entry in home["shards"]]
        again = {"groups": [0, 1], "files": [old.file], "versions": {}}
        batch = reference("collect", 1, old, new, replayed=again)
        for rewards, asked in (([reference("reward", 0, *entries)], 1), ([], 2)):
            found = await worker.reward([batch], scored=rewards)
            merged = merge_rewards([found], config)
            assert found["weight"] == 3
            assert merged["metrics"]["episodes_failed"] == 1
            rows = {row >> SAMPLE_BITS for each in found["shards"] for row in each["row_ids"]}
            assert rows == {0, 8, 9, 7, 10, 11}
            assert seen.read_text().split().count("1") == asked


def test_too_many_failures_fail_the_stage_with_examples(tmp_path: Path) -> None:
    failing = {"function": f"{HERE}:never", "environments": []}
    with pytest.raises(EarlError) as raised:
        scores_of(tmp_path, [failing], max_failed_share=0.2)
    assert "3 of 10 episodes have no reward" in str(raised.value)
    assert "reward.max_failed_share allows a share of 0.2: repair the functions" in str(
        raised.value
    )
    assert str(raised.value).count("RuntimeError: no score of win") == 3


JUDGE = {"base_url": "http://127.0.0.1:1/v1", "model": "m", "prompt": "?"}


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("jugde", {}, "there is no function 'jugde': did you mean 'judge'"),
        (f"{HERE}:missing", {}, "cannot be imported: AttributeError"),
        (f"{HERE}:brief", {}, "argument: 'most'"),
        (f"{HERE}:brief", {"most": 1, "least": 0}, "unexpected keyword argument 'least'"),
        (f"{HERE}:HERE", {}, "cannot be imported"),
        (f"{HERE}:math.pi", {}, "is not a callable object"),
        ("judge", {"model": "m"}, "missing 2 required keyword-only arguments"),
        ("judge", {**JUDGE, "pattern": "score"}, "has no group"),
        ("judge", {**JUDGE, "scale": [1, 1]}, "write [least, greatest]"),
        ("judge", {**JUDGE, "prompt": 3}, "prompt is 3: write a text"),
        ("reward_model", {"base_url": "host:1", "model": "m"}, "begin it with http://"),
    ],
)
async def test_functions_are_checked_before_work_starts(
    tmp_path: Path, function: str, options: dict[str, Any], message: str
) -> None:
    reward = {"functions": [{"function": function, "label": "mine", "options": options}]}
    with pytest.raises(ConfigError) as raised:
        await check_environments(configuration(tmp_path, reward))
    assert "the reward function 'mine'" in str(raised.value)
    assert message in str(raised.value)
