"""What a run controller, or a single iteration, refuses: the run stays as it was."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect import State

from earl_core.cluster.errors import WorkerCallFailed
from earl_core.config import ConfigError, RunConfig, load_config, parse_config
from earl_core.control.run_controller import close_controller, open_controller
from earl_core.run import RunDirectory
from earl_core.run.checkpoints import describe_state
from flows.iteration import iteration
from flows.train import train
from tasks.tracking.tracker import Tracker


def config_in(directory: Path, model: Path, **changes: Any) -> RunConfig:
    return parse_config(
        {
            "name": "run",
            "runs_directory": str(directory / "runs"),
            "iterations": 2,
            "model": {"path": str(model)},
            "environment": {"name": "tic_tac_toe", "options": {"style": "compact"}},
            "rollout": {
                "engine": "torch",
                "prompts_per_iteration": 2,
                "group_size": 2,
                "max_turns": 5,
                "max_tokens_per_turn": 2,
                "dtype": "float32",
            },
            "dispatch": {"directory": str(directory / "shm")},
            "tracking": {"enabled": False},
            **changes,
        }
    )


def with_checkpoints(config: RunConfig, iterations: int) -> Path:
    run = RunDirectory.open(config)
    for number in range(iterations):
        run.checkpoint_path(number).mkdir(parents=True)
        describe_state(run.checkpoint_path(number), {"policy_version": number + 1}, {})
        run.mark_stable(number)
    run.close()
    return run.path


def test_settings_that_are_refused_are_not_kept(tmp_path: Path, tiny_model: Path) -> None:
    config = config_in(tmp_path, tiny_model)
    path = with_checkpoints(config, 1)
    large = {"directory": str(tmp_path / "shm"), "max_bytes": 2**60}
    with pytest.raises(ConfigError, match=r"dispatch.max_bytes is .*lower it, or leave it out"):
        open_controller(config_in(tmp_path, tiny_model, dispatch=large, iterations=5), Tracker)
    assert load_config(path / "config.yaml") == config
    close_controller(open_controller(config_in(tmp_path, tiny_model, iterations=5), Tracker))
    assert load_config(path / "config.yaml").iterations == 5


def test_an_environment_that_cannot_be_made_binds_no_run(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code is the user's and runs in a process of its own; the corrected name then starts."""
    # Another file's tests in this process may have imported it.
    monkeypatch.delitem(sys.modules, "tests.rollout.environments", raising=False)
    wrong = {"name": "tests.rollout.environments:NoSuchGame"}
    with pytest.raises(WorkerCallFailed, match="NoSuchGame"):
        open_controller(config_in(tmp_path, tiny_model, environment=wrong), Tracker)
    assert "tests.rollout.environments" not in sys.modules
    assert list(tmp_path.iterdir()) == []
    close_controller(open_controller(config_in(tmp_path, tiny_model), Tracker))
    assert load_config(tmp_path / "runs" / "run" / "config.yaml").environment.name == "tic_tac_toe"


def test_a_run_that_has_all_its_iterations_is_left_alone(tmp_path: Path, tiny_model: Path) -> None:
    path = with_checkpoints(config_in(tmp_path, tiny_model), 2)
    for number, words in (
        (None, r"all 2 iterations of .* are done: to go on, raise `iterations`"),
        (0, "iteration 0 of .* is done already"),
    ):
        state = asyncio.run(iteration.fn(str(path), number))
        assert isinstance(state, State)
        assert state.is_completed()
        assert state.name == "Skipped"
        assert re.search(words, str(state.message))
    with pytest.raises(ConfigError, match=r"has no iteration 2: its 2 iterations .* from 0 to 1"):
        asyncio.run(iteration.fn(str(path), 2))
    # Nothing was done, and nothing waits in shared memory for an iteration that will not come.
    run = RunDirectory.open(load_config(path / "config.yaml"))
    stages = [line["stage"] for line in run.ledger() if line["stage"] != "run"]
    assert stages == ["checkpoint"] * 2
    assert run.stable_iterations() == [0, 1]
    run.close()


def test_a_run_that_has_more_iterations_than_are_wanted_now_is_finished(
    tmp_path: Path, tiny_model: Path
) -> None:
    path = with_checkpoints(config_in(tmp_path, tiny_model), 2)
    shutil.rmtree(path / "checkpoints" / "000000")
    wanted = ["iterations=1", "evaluation.every=1"]
    asyncio.run(train.fn(str(path / "config.yaml"), overrides=wanted))
    assert json.loads((path / "run.json").read_text())["finished"]


def test_a_finished_run_stays_finished(tmp_path: Path, tiny_model: Path) -> None:
    path = with_checkpoints(config_in(tmp_path, tiny_model), 2)
    asyncio.run(iteration.fn(str(path)))
    assert json.loads((path / "run.json").read_text())["finished"]
    assert not [file for file in (tmp_path / "shm").rglob("*") if file.is_file()]
