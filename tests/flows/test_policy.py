"""A run's policy that is played while the run goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from earl_core.config import ConfigError
from earl_core.control.policy_player import PolicyPlayer, find_checkpoint
from earl_core.run import RunDirectory
from earl_core.run.checkpoints import describe_state
from tests.flows.test_refused_runs import config_in


def test_a_checkpoint_that_is_played_is_not_pruned(tmp_path: Path, tiny_model: Path) -> None:
    config = config_in(tmp_path, tiny_model, checkpoint={"keep_last": 1})
    run = RunDirectory.open(config)

    def finish(iteration: int) -> None:
        shutil.copytree(tiny_model, run.checkpoint_path(iteration) / "policy")
        describe_state(run.checkpoint_path(iteration), {"policy_version": iteration + 1}, {})
        run.mark_stable(iteration)
        run.prune_checkpoints()

    finish(0)
    found = find_checkpoint(run.path, config)
    with PolicyPlayer(config, found) as player:
        finish(1)
        finish(2)
        assert run.stable_iterations() == [0, 2]
        assert player.play_one(prompt=0, seed=1, temperature=1.0)["turns"]
    run.prune_checkpoints()
    assert run.stable_iterations() == [2]
    with pytest.raises(ConfigError, match="removed just now"):
        PolicyPlayer(config, found)
    run.close()
