"""Runs whose first iterations imitate: killed and resumed, from chats and from another run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from earl_core.cluster.errors import WorkerCallFailed
from earl_core.control.run_controller import close_controller, open_controller
from earl_core.models.tiny import legal_play
from tasks.tracking.tracker import Tracker
from tests.flows.runs import Runs
from tests.flows.test_refused_runs import config_in
from tests.flows.test_resume import ONCE
from tests.learnt import assert_learnt, weights_in

GAME = {"name": "tic_tac_toe", "options": {"style": "compact"}}
IMITATING = (
    "iterations=3",
    "update.minibatches=2",
    "rollout.prompts_per_iteration=8",
    "tracking={enabled: false, keep_episodes: all}",
)


def scripted(place: Path, games: int, seed: int = 3) -> Path:
    """Chats of random legal moves."""
    config = config_in(place.parent, place)
    assert config.environment is not None
    with place.open("w") as file:
        for played in legal_play([config.environment], games, seed).games:
            messages: list[dict[str, Any]] = []
            for heard, said in played:
                messages += [*map(dict, heard), {"role": "assistant", "content": said}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return place


@pytest.mark.slow
def test_killed_while_it_imitates_a_run_ends_with_the_same_bits(runs: Runs) -> None:
    chats = scripted(runs.directory / "chats.jsonl", 20)
    told = {"data": str(chats), "iterations": 2, "learning_rate": 3e-3}
    imitating = (*IMITATING, f"imitation={json.dumps(told)}")
    # In the middle of the stage, at its end, and between the steps of its update.
    assert "demonstrate" in runs.train(*imitating, ONCE, fault="demonstrate.read@1=kill", expect=1)
    runs.wait_for_workers_to_end()
    whole, other, *cut, last = runs.train_here(
        {"overrides": [*imitating, "name=whole"]},
        {"overrides": [*imitating, "name=other", "seed=1"]},
        {"overrides": imitating, "fault": "demonstrate.seal@1=raise"},
        {"overrides": imitating, "fault": "update.step0@1=raise"},
        # The first update that plays, whose optimizer is fresh.
        {"overrides": imitating, "fault": "update.step0@2=raise"},
        {"overrides": imitating},
    )
    assert whole is other is last is None
    assert all("injected failure" in str(ending) for ending in cut)
    runs.assert_learnt(than="other")
    for iteration in range(3):
        assert runs.weights(iteration) == runs.weights(iteration, "whole")
    sealed = runs.executed("sealed")
    for iteration, stage in [(0, "demonstrate"), (1, "demonstrate"), (2, "rollout")]:
        assert sealed.count((iteration, stage)) == 1
    assert {stage for iteration, stage in sealed if iteration < 2} >= {"select", "demonstrate"}
    assert not {stage for iteration, stage in sealed if iteration < 2} & {"rollout", "reward"}
    first, second, third = runs.metrics()
    # 20 chats of 32 a time: the second iteration is in the fourth epoch.
    assert [line["demonstrate/epochs"] for line in (first, second)] == [1.6, 3.2]
    assert second["update/loss"] < first["update/loss"]
    assert "reward/mean" in third
    # The first prompts are played by the first iteration that plays.
    episodes = pq.read_table(runs.run() / "iterations/000002/episodes.parquet")
    assert min(episodes["prompt_id"].to_pylist()) == 0
    assert json.loads((runs.run() / "checkpoints/000002/state.json").read_text())


@pytest.mark.slow
def test_the_best_episodes_of_another_run_are_imitated_token_by_token(runs: Runs) -> None:
    runs.train(*IMITATING, "iterations=1", "name=teacher")
    told = {"run": "teacher", "iterations": 1, "learning_rate": 3e-3, "best_of": 2}
    runs.train(*IMITATING, "iterations=2", f"imitation={json.dumps(told)}")
    rows = pq.read_table(runs.run("teacher") / "iterations/000000/episodes.parquet").to_pylist()
    best = [max(rows[at : at + 2], key=lambda row: row["reward"]) for at in range(0, 32, 2)]
    assert len({row["reward"] for row in best}) > 1
    (first, *_) = runs.metrics()
    assert first["demonstrate/available"] == 16
    trained = [sum(row["loss_mask"]) for row in best]
    assert first["update/tokens_trained"] == 2 * sum(trained)
    assert_learnt([first["update/grad_norm"]], weights_in(runs.model), weights_in(runs.policy(0)))


@pytest.mark.slow
def test_data_that_changes_between_attempts_is_noticed(runs: Runs) -> None:
    chats = scripted(runs.directory / "chats.jsonl", 8)
    told = {"data": str(chats), "iterations": 3, "episodes_per_iteration": 4}
    imitating = (*IMITATING, f"imitation={json.dumps(told)}")
    (ending,) = runs.train_here({"overrides": imitating, "fault": "demonstrate.before@1=raise"})
    assert ending is not None
    scripted(chats, 8, seed=4)
    assert runs.train_here({"overrides": imitating}) == [None]
    said = "the demonstrations are other ones than those of iteration 0"
    assert runs.executed(said) == [(1, "demonstrate")]


def test_what_cannot_be_imitated_is_said_before_anything_starts(
    tmp_path: Path, tiny_model: Path
) -> None:
    """In one sentence, as a mistake of the run file; corrected, the run starts."""
    chats = tmp_path / "chats.jsonl"
    heard = {"role": "user", "content": "123|456|789"}
    told = {"data": str(chats), "iterations": 1, "episodes_per_iteration": 3}
    config = config_in(tmp_path, tiny_model, imitation=told)
    chats.write_text(json.dumps({"messages": [heard]}) + "\n")
    with pytest.raises(WorkerCallFailed) as refused:
        open_controller(config, Tracker)
    assert (refused.value.expected, refused.value.exit_code) == (True, 2)
    assert "row 0 of" in refused.value.raised.message
    assert "has no turn of the assistant" in refused.value.raised.message
    assert "\n" not in refused.value.raised.message
    assert not list((tmp_path / "runs/run/iterations").glob("*"))
    chats.write_text(
        json.dumps({"messages": [heard, {"role": "assistant", "content": "5"}]}) + "\n"
    )
    close_controller(open_controller(config, Tracker))
