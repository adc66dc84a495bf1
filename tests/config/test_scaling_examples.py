"""The stage deployments that the documentation shows are valid, and need what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from earl_core.config import parse_config

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
DEVICES = [1, 2, 8, 2, 8]


@pytest.mark.parametrize(("block", "devices"), list(zip(BLOCKS, DEVICES, strict=True)))
def test_a_stage_deployment_in_the_documentation(block: str, devices: int) -> None:
    config = parse_config(
        {
            "name": "documented",
            "iterations": 100,
            "model": {"path": "models/any"},
            "environment": {"name": "tic_tac_toe"},
            "rollout": {
                "engine": "vllm",
                "prompts_per_iteration": 16,
                "group_size": 4,
                "max_turns": 5,
            },
            **yaml.safe_load(block),
        }
    )
    stages = config.stages
    assert {
        stages.placed.needed(*(each.ranks if each else 1 for each in both))
        for both in (stages.at(iteration) for _, iteration in stages.steps())
    } == {devices}
