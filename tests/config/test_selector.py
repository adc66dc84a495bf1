"""The `selector` section: what it means, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from earl_core.config import ConfigError, RunConfig, load_config, parse_config
from earl_core.config.stage_keys import stage_key
from earl_core.config.table import resolved_rows
from tests.config.test_config import with_

CONFIGS = Path(__file__).parents[2] / "earl_core" / "recipes"


def config(stages: dict[str, Any] | None = None, **selector: Any) -> RunConfig:
    return parse_config(with_(stages=stages or {}, selector=selector, rollout__engine="torch"))


@pytest.mark.parametrize(
    ("stages", "selector", "message"),
    [
        ({}, {"polcy": "fixed"}, "selector.polcy: unknown key"),
        ({}, {"policy": "best"}, "selector.policy"),
        ({}, {"fixed_fields": ["update.shard"]}, "means nothing under selector.policy `fixed`"),
        ({}, {"policy": "live_tokens", "profile_directory": ""}, "selector.profile_directory"),
        (
            {"changes": [{"iteration": 1, "update": {}}]},
            {"policy": "live_tokens"},
            "both say when stage deployments change",
        ),
        ({"placement": "separate"}, {"policy": "average_context"}, "set it to `colocated`"),
        ({}, {"policy": "live_tokens", "tensor_parallel": [1, 2]}, "runs on one device"),
    ],
)
def test_bad_sections_say_what_to_change(
    stages: dict[str, Any], selector: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config(stages, **selector)
    assert message in str(caught.value)


def test_the_table_says_who_lays_the_stages_out() -> None:
    def deployments(config: RunConfig) -> dict[str, str]:
        return {row[0]: row[1] for row in resolved_rows(config) if "stage deployment" in row[0]}

    assert deployments(config()) == {
        "stage deployment of the rollout": "all GPUs, or one rank without any",
        "stage deployment of the update": "all GPUs, or one rank without any",
    }
    assert deployments(config(policy="live_tokens")) == {
        "stage deployment of rollout, update": "live_tokens"
    }
    assert deployments(config(policy="average_context")) == {
        "stage deployment of the update": "all GPUs, or one rank without any",
        "stage deployment of rollout": "average_context",
    }


def test_a_policy_that_is_not_decided_moves_nothing_and_the_table_says_so() -> None:
    auto = config()
    assert auto.selector.policy == "auto"
    assert auto.selector.moves == ()
    assert not auto.divides
    row = ("who lays the stages out", "auto: decided at the start", "selector.policy")
    assert row in resolved_rows(auto)
    assert row not in resolved_rows(config(policy="fixed"))
    # What `fixed` takes, it takes.
    assert config({"changes": [{"iteration": 1, "update": {}}]}).stages.changes
    assert config({"placement": "separate"}).stages.placement == "separate"


def test_another_policy_chooses_anew_and_repeats_nothing_else() -> None:
    one, other = config(), config(policy="live_tokens")

    def same(stage: str) -> bool:
        return stage_key(one, "r", 1, stage, ()) == stage_key(other, "r", 1, stage, ())

    assert not same("select")
    assert same("rollout")
    assert same("update")


def test_the_example_is_valid() -> None:
    assert load_config(CONFIGS / "tictactoe_selector.yaml").selector.policy == "live_tokens"
