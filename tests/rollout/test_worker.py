"""The rollout worker: JSON in, JSON out, samples in shared memory."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from earl_core.cluster.rank_process import WorkerContext
from earl_core.cluster.worker_group import WorkerGroup
from earl_core.config import ConfigError, RunConfig
from earl_core.rollout.errors import RolloutFailed, WeightSyncError
from earl_core.rollout.mixture import HELD_OUT_PROMPTS
from earl_core.rollout.rollout_stats import (
    RolloutStats,
    check_failures,
    evaluation_results,
    merge,
    rollout_metrics,
    selector_statistics,
)
from earl_core.rollout.rollout_worker import RolloutWorker
from earl_core.run.record import write_record
from earl_core.system.errors import Cancelled
from earl_core.trajectory.samples import derive_seed
from earl_core.trajectory.schema import ROLLOUT_SCHEMA
from earl_core.weights.load import manifest_from_directory
from earl_core.weights.publish import publish
from tests.engines.probes import probe_of
from tests.rollout.chat_models import tiny_model

DEPLOYMENT = {"stage": "rollout", "threads": 1, "max_running_requests": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("worker") / "model")


class Setting:
    """A run directory and its worker."""

    def __init__(self, root: Path, model: Path) -> None:
        self.root, self.model = root, model
        self.progress: list[dict[str, Any]] = []
        self.config: dict[str, Any] = {
            "name": "run",
            "seed": 5,
            "iterations": 2,
            "model": {"path": str(model)},
            "environment": {
                "name": "tic_tac_toe",
                "options": {"style": "compact", "illegal_action": "retry", "max_retries": 3},
                "step_timeout_seconds": 4.0,
            },
            "rollout": {
                "engine": "torch",
                "dtype": "float32",
                "prompts_per_iteration": 6,
                "group_size": 2,
                "max_turns": 5,
                "max_tokens_per_turn": 2,
            },
            "dispatch": {"directory": str(root / "shm")},
        }
        run = root / "run"
        run.mkdir()
        write_record(run, {"uid": "0123456789ab"})

    def worker(self, iteration: int = 0) -> RolloutWorker:
        context = WorkerContext(
            rank=0,
            world_size=1,
            role="rollout",
            log_path=self.root / "rollout-0.log",
            iteration=iteration,
            _send_progress=self.progress.append,
        )
        self.cancelled: threading.Event = context.cancelled
        return RolloutWorker(
            context, DEPLOYMENT, config=self.config, run_directory=str(self.root / "run")
        )

    def weights(self, version: int = 0) -> dict[str, Any]:
        return manifest_from_directory(self.model, version).model_dump(mode="json")

    def run(self, work: Callable[[RolloutWorker], Awaitable[Any]], **place: int) -> Any:
        """`work` on a ready worker, which is closed afterwards; the result passed as JSON."""

        async def session() -> Any:
            worker = self.worker(**place)
            try:
                await worker.ensure(self.weights())
                return await work(worker)
            finally:
                await worker.close()

        return json.loads(json.dumps(asyncio.run(session()), allow_nan=False))

    def table(self, result: dict[str, Any]) -> pa.Table:
        (entry,) = result["shards"]
        with pa.memory_map(str(self.root / "shm" / "0123456789ab" / entry["file"])) as source:
            return pa.ipc.open_file(source).read_all()


@pytest.fixture
def setting(tmp_path: Path, model: Path) -> Setting:
    torch.manual_seed(0)
    return Setting(tmp_path, model)


def tally_of(result: dict[str, Any]) -> RolloutStats:
    return RolloutStats.model_validate(result["tally"])


def test_rollout_publishes_samples_and_their_tally(setting: Setting) -> None:
    result = setting.run(lambda worker: worker.rollout(range(12, 18)))
    table = setting.table(result)
    table.validate(full=True)
    assert table.schema.equals(ROLLOUT_SCHEMA)
    assert table["episode_id"].to_pylist() == list(range(24, 36))
    assert table["group_id"].to_pylist() == [group for group in range(12, 18) for _ in range(2)]
    assert set(table["policy_version_first"].combine_chunks().values.to_pylist()) == {0}
    numbers = rollout_metrics(tally_of(result))
    assert numbers["episodes"] == 12
    assert numbers["samples_per_episode"] == 1.0
    shares = [share for name, share in numbers.items() if name.startswith("outcome/")]
    ended = numbers.get("finish/done", 0.0)
    assert sum(shares) == pytest.approx(ended)
    assert selector_statistics(tally_of(result))["live_tokens_max"] >= numbers["context/max"] > 0
    assert numbers["peak_memory_bytes"] > 10**7
    for texts, turns in zip(table["texts"].to_pylist(), table["turns"].to_pylist(), strict=True):
        assert len(json.loads(texts)) == 2 * turns + 1
        assert all(json.loads(texts)[::2]), "an observation"
    assert set(table["outcome"].to_pylist()) <= {"win", "draw", "loss", "illegal", ""}
    assert setting.progress[-1]["episodes_done"] == setting.progress[-1]["episodes"] == 12


def test_a_repeated_rollout_is_equal_and_another_iteration_is_not(setting: Setting) -> None:
    first = setting.table(setting.run(lambda w: w.rollout(range(4)), iteration=1))
    again = setting.table(setting.run(lambda w: w.rollout(range(4)), iteration=1))
    other = setting.table(setting.run(lambda w: w.rollout(range(4)), iteration=2))
    assert first.equals(again)
    assert not first.equals(other)


def test_shares_of_one_rollout_are_what_one_call_plays(setting: Setting) -> None:
    whole = setting.run(lambda w: w.rollout(range(10, 15)))

    async def play_shares(worker: RolloutWorker) -> list[Any]:
        return [
            await worker.rollout(range(first, first + count), share=number, of_prompts=5)
            for number, (first, count) in enumerate([(10, 2), (12, 3)])
        ]

    shares = setting.run(play_shares)
    together = pa.concat_tables([setting.table(share) for share in shares])
    alone = setting.table(whole)
    for name in ("episode_id", "group_id", "tokens", "loss_mask", "turn_rewards", "texts"):
        assert together[name].to_pylist() == alone[name].to_pylist()
    tally = merge([[tally_of(share)] for share in shares])
    numbers = rollout_metrics(tally)
    for name, value in rollout_metrics(tally_of(whole)).items():
        if not any(word in name for word in ("second", "share", "memory")):
            assert numbers[name] == pytest.approx(value), name


def test_ensure_loads_only_what_is_new(setting: Setting, tmp_path: Path) -> None:
    tensors = {
        name: tensor + 0.1 * torch.randn_like(tensor)
        for name, tensor in load_file(setting.model / "model.safetensors").items()
    }
    changed = publish(tensors, tmp_path / "weights", 1, torch.float32).model_dump(mode="json")

    async def work(worker: RolloutWorker) -> list[Any]:
        before = await worker.play_one(0, 1)
        same = await worker.ensure(setting.weights())
        new = await worker.ensure(changed)
        after = await worker.play_one(0, 1)
        back = await worker.ensure(setting.weights())
        return [before, same, new, after, back, await worker.play_one(0, 1)]

    before, same, new, after, back, again = setting.run(work)
    assert (same["loaded"], same["policy_version"]) == (False, 0)
    assert (new["loaded"], new["policy_version"]) == (True, 1)
    assert (back["loaded"], back["policy_version"]) == (True, 0)
    answers = [[turn["answer"] for turn in found["turns"]] for found in (before, after, again)]
    assert answers[0] == answers[2] != answers[1]


def test_an_engine_that_answers_as_another_version_plays_no_episode(
    setting: Setting, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(setting.model, dtype=torch.float32)
    right = {**setting.weights(), "policy_version": 1}
    right["probe"] = [
        r.model_dump() for r in probe_of(model, [[5, 40 + n, 9, 33] for n in range(9)])
    ]
    changed = {
        name: tensor + 0.3 * torch.randn_like(tensor) for name, tensor in model.state_dict().items()
    }
    wrong = publish(changed, tmp_path / "weights", 2, torch.float32).model_dump(mode="json")
    wrong["probe"] = right["probe"]

    async def work(worker: RolloutWorker) -> list[Any]:
        plain = await worker.rollout(range(4))
        ensured = await worker.ensure(right)
        with pytest.raises(WeightSyncError, match=r"policy version 2 .* No episode was played"):
            await worker.rollout(range(4), shards_of="wrong", weights=wrong)
        return [plain, ensured, await worker.rollout(range(4), share=1, weights=setting.weights())]

    plain, ensured, again = setting.run(work)
    assert ensured["probe"]["probe_mismatch_max"] < 1e-4
    assert ensured["probe"]["probe_other_share"] == 0.0
    # Neither an engine that was asked nor one built after another was ended draws other tokens.
    assert setting.table(plain).equals(setting.table(again))
    assert not list((setting.root / "shm").rglob("*wrong*"))


def test_evaluation_is_held_out_and_repeatable(setting: Setting) -> None:
    async def work(worker: RolloutWorker) -> list[Any]:
        return [await worker.evaluate(8), await worker.evaluate(8)]

    first, second = setting.run(work, iteration=1)
    later, _ = setting.run(work, iteration=2)
    setting.config["evaluation"] = {"options": {"opponent": "perfect"}}
    hard = setting.run(lambda worker: worker.evaluate(8, temperature=0.0))
    del setting.config["evaluation"]
    results = [evaluation_results(tally_of(found)) for found in (first, second, later, hard)]
    assert results[0]["outcomes"] == results[1]["outcomes"] == results[2]["outcomes"]
    assert results[0]["metrics"]["return/mean"] == results[1]["metrics"]["return/mean"]
    assert [found["metrics"]["episodes"] for found in results] == [8] * 4
    assert results[3]["metrics"]["return/mean"] != results[0]["metrics"]["return/mean"]
    for outcome in results[0]["outcomes"].values():
        assert 0 <= outcome["low"] <= outcome["share"] <= outcome["high"] <= 1
        assert outcome["count"] == round(outcome["share"] * 8)
    assert not (setting.root / "shm").exists()
    seed = derive_seed(setting.config["seed"], "evaluation", HELD_OUT_PROMPTS)
    alone = setting.run(lambda worker: worker.play_one(HELD_OUT_PROMPTS, seed))
    one = evaluation_results(tally_of(setting.run(lambda worker: worker.evaluate(1))))["metrics"]
    assert (one["return/mean"], one["turns/mean"]) == (alone["return"], len(alone["turns"]))


def test_a_suite_is_scored_by_the_functions_that_it_names(setting: Setting) -> None:
    function = {"function": "tests.experience.scoring_functions:by_number", "weight": 4.0}
    suite = {**setting.config["environment"], "label": "held", "prompts": 3, "attempts": 2}
    setting.config["reward"] = {"functions": [function], "environment_weight": 0.0}
    setting.config["evaluation"] = {"suites": [suite]}
    own = tally_of(setting.run(lambda worker: worker.play_suite("held", 3)))
    suite["scored_by"] = ["by_number"]
    scored = tally_of(setting.run(lambda worker: worker.play_suite("held", 3)))
    assert (own.episodes, scored.episodes) == (6, 6)
    assert own.passes != scored.passes == {"2/2": 3}
    assert scored.returns.mean == 1.0
    suite["scored_by"] = ["by_numbers"]
    with pytest.raises(ValueError, match="scored_by 'by_numbers'"):
        RunConfig.model_validate(setting.config)


def test_an_answer_to_a_person(setting: Setting) -> None:
    messages = [{"role": "user", "content": "X2O|4X6|789"}]
    result = setting.run(lambda worker: worker.answer(messages, seed=3))  # type: ignore[arg-type]
    assert isinstance(result["text"], str)
    assert 1 <= result["tokens"] <= 2


def test_episodes_whose_environment_fails_leave_the_shard(setting: Setting) -> None:
    setting.config["environment"] |= {
        "name": "tests.rollout.environments:Unreliable",
        "options": {"raising": [1], "hanging": [4]},
    }
    setting.config["rollout"]["max_failed_share"] = 0.5
    result = setting.run(lambda worker: worker.rollout(range(6)))
    assert sorted(set(setting.table(result)["group_id"].to_pylist())) == [0, 2, 3, 5]
    numbers = rollout_metrics(tally_of(result))
    assert numbers["episodes_failed"] == 4
    assert numbers["return/mean"] == 2.0
    setting.config["rollout"]["max_failed_share"] = 0.1
    with pytest.raises(RolloutFailed, match=r"(?s)4 of 12 episodes.*this prompt has no answer"):
        setting.run(lambda worker: worker.rollout(range(6)))


def test_episodes_that_lost_their_host_and_cannot_be_replayed_are_played_anew(
    setting: Setting,
) -> None:
    setting.config["environment"] |= {
        "name": "tests.rollout.environments:Fleeting",
        "options": {"hanging": 3, "mark": str(setting.root / "hung")},
    }
    setting.config["rollout"]["max_failed_share"] = 0.1
    result = setting.run(lambda worker: worker.rollout(range(6)))
    # The call over its deadline failed its own episode, and cost the host of all others.
    numbers = rollout_metrics(tally_of(result))
    assert numbers["episodes_failed"] == 1
    assert numbers["episodes"] == 11
    assert numbers["episodes_retried"] >= 1
    assert numbers["return/mean"] == 3.0
    assert numbers["turns/mean"] == 3.0
    assert setting.table(result)["group_id"].to_pylist().count(3) == 1


def test_failures_of_a_share_are_judged_against_the_whole(setting: Setting) -> None:
    """A share may fail altogether where the rollout as a whole may bear it."""
    setting.config["environment"] |= {
        "name": "tests.rollout.environments:Unreliable",
        "options": {"raising": [0, 1], "hanging": []},
    }
    setting.config["rollout"]["max_failed_share"] = 0.4

    async def play_shares(worker: RolloutWorker) -> list[Any]:
        return [
            await worker.rollout(range(2 * n, 2 * n + 2), share=n, of_prompts=6) for n in range(3)
        ]

    shares = setting.run(play_shares)
    assert [setting.table(share).num_rows for share in shares] == [0, 4, 4]
    tally = merge([[tally_of(share)] for share in shares])
    check_failures(tally, 0.4)
    words = r"4 of 12 episodes failed, more than.*\(4 of 4\) is .*this prompt has no answer"
    with pytest.raises(RolloutFailed, match=words):
        check_failures(tally, 0.3)


def test_a_rollout_that_failed_altogether_says_why(setting: Setting) -> None:
    setting.config["environment"] |= {
        "name": "tests.rollout.environments:Unreliable",
        "options": {"raising": [0, 1], "hanging": []},
    }
    setting.config["rollout"]["max_failed_share"] = 1.0
    words = r"every episode failed.*\(4 of 4\) is environment_error: .*this prompt has no answer"
    with pytest.raises(RolloutFailed, match=words):
        setting.run(lambda worker: worker.rollout(range(2)))
    setting.config["rollout"]["max_failed_share"] = 0.1
    with pytest.raises(RolloutFailed, match="of 12 episodes failed"):
        setting.run(lambda worker: worker.rollout(range(2), of_prompts=6))


def test_in_a_worker_group(setting: Setting) -> None:
    group = WorkerGroup(
        "rollout",
        "earl_core.rollout.rollout_worker:RolloutWorker",
        log_directory=setting.root / "logs",
    )
    arguments = {"config": setting.config, "run_directory": str(setting.root / "run")}
    where: dict[str, Any] = {"stage": "rollout", "iteration": 0, "deadline_seconds": 300}
    seen: list[dict[str, Any]] = []
    try:
        group.start(DEPLOYMENT, arguments)
        ready = group.call("ensure", weights=setting.weights(), **where)
        assert [rank["policy_version"] for rank in ready] == [0]
        results = group.call("rollout", groups=list(range(6)), on_progress=seen.append, **where)
        pids = group.pids
    finally:
        group.stop()
    episodes = [setting.table(result)["episode_id"].to_pylist() for result in results]
    assert episodes == [list(range(12))]
    assert seen
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_cancelled_rollout_leaves_a_usable_worker(setting: Setting) -> None:
    async def work(worker: RolloutWorker) -> Any:
        setting.cancelled.set()
        with pytest.raises(Cancelled):
            await worker.rollout(range(600))
        setting.cancelled.clear()
        return await worker.rollout(range(2))

    assert tally_of(setting.run(work)).episodes == 4


def test_a_missing_model_is_one_clear_error(setting: Setting) -> None:
    setting.config["model"] = {"path": str(setting.root / "nowhere")}
    worker = setting.worker()
    with pytest.raises(ConfigError, match=r"set model\.path"):
        asyncio.run(worker.ensure(setting.weights()))
    with pytest.raises(RuntimeError, match="call `ensure` first"):
        asyncio.run(worker.rollout(range(1)))


def test_released_memory_comes_back(setting: Setting) -> None:
    async def work(worker: RolloutWorker) -> Any:
        before = await worker.play_one(0, 1)
        await worker.release_memory()
        await worker.restore_memory()
        await worker.ensure(setting.weights())
        return [before, await worker.play_one(0, 1)]

    before, after = setting.run(work)
    assert [t["answer"] for t in before["turns"]] == [t["answer"] for t in after["turns"]]
