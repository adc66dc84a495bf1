"""Names that are nearly right are answered with the one that was meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from earl_core.algorithms.advantages import ADVANTAGE_ESTIMATORS
from earl_core.algorithms.policy_losses import POLICY_LOSSES
from earl_core.config import ConfigError, load_config, parse_config
from earl_core.environments.registry import create
from earl_core.environments.rewards.reward_functions import RewardFunctions
from earl_core.environments.tools.functions import load_tool
from flows.cli.plan_arguments import find_hardware, find_model
from tests.config.test_config import with_


def config(**changes: Any) -> Callable[[], object]:
    return lambda: parse_config(with_(**changes))


CASES: dict[str, tuple[Callable[[], object], str]] = {
    "an environment": (lambda: create("tic_tak_toe"), "tic_tac_toe"),
    "hyphens": (lambda: create("Connect-Four"), "connect_four"),
    "an agent": (lambda: create("agent:verifier"), "verifiers"),
    "a tool": (lambda: load_tool("calculater"), "calculator"),
    "a reward function": (
        lambda: RewardFunctions([{"label": "a", "function": "jugde", "options": {}}], 1.0), "judge",
    ),
    "an estimator": (lambda: ADVANTAGE_ESTIMATORS.build("gropo"), "grpo"),
    "a loss": (lambda: POLICY_LOSSES.build("ppo-clip"), "ppo_clip"),
    "a recipe": (lambda: load_config("tictactoe_tinny"), "tictactoe_tiny"),
    "a model": (lambda: find_model("qwen3-8bb"), "qwen3-8b"),
    "a device": (lambda: find_hardware("4xhh200"), "h200"),
    "an option": (lambda: create("tic_tac_toe", {"oponent": "random"}), "opponent"),
    "an option's value": (lambda: create("tic_tac_toe", {"opponent": "randon"}), "random"),
    "a value": (config(rollout__engine="vlm"), "vllm"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_did_you_mean(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    act, name = CASES[case]
    with pytest.raises(ConfigError) as caught:
        act()
    if name:
        assert f"did you mean {name!r}?".lower() in str(caught.value).lower()


def test_what_is_like_nothing_gets_no_guess() -> None:
    with pytest.raises(ConfigError) as caught:
        create("chess")
    assert "did you mean" not in str(caught.value)
