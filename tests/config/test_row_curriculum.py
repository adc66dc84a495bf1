"""Settings of a curriculum over rows: where it cannot be, and which stages it decides."""

from __future__ import annotations

from typing import Any

import pytest

from earl_core.config import ConfigError, parse_config
from earl_core.config.run import RunConfig
from earl_core.config.stage_keys import stage_key

ROWS = {"name": "prompt", "options": {"path": "rows.jsonl"}}


def parsed(**changes: Any) -> RunConfig:
    rollout = {"prompts_per_iteration": 4, "group_size": 2, "max_turns": 1}
    base = {"name": "x", "iterations": 2, "model": {"path": "m"}, "rollout": rollout}
    return parse_config(base | changes)


def test_held_out_prompts_have_none() -> None:
    suite = {**ROWS, "label": "maths", "curriculum": {}}
    with pytest.raises(ConfigError, match="the suite maths has a curriculum"):
        parsed(environment=ROWS, evaluation={"every": 1, "suites": [suite]})
    both = [{**ROWS, "label": label, "curriculum": {}} for label in ("a", "b")]
    for config in (parsed(environment={**ROWS, "curriculum": {}}), parsed(environments=both)):
        assert set(config.row_curricula) == ({"a", "b"} if config.environments else {""})
        assert all(each.curriculum is None for each in config.evaluated.values())
    with pytest.raises(ConfigError, match=r"that of the rows .* is environment\.curriculum"):
        parsed(environment=ROWS, curriculum={})


@pytest.mark.parametrize("several", [False, True])
def test_it_decides_what_is_drawn_and_nothing_else(several: bool) -> None:
    def keys(curriculum: dict[str, float] | None) -> dict[str, str]:
        asked = {**ROWS, "curriculum": curriculum}
        one = {**ROWS, "label": "other"}
        config = parsed(**({"environments": [asked, one]} if several else {"environment": asked}))
        stages = ("rollout", "collect", "reward", "evaluation", "update")
        return {stage: stage_key(config, "uid", 1, stage, []) for stage in stages}

    found = [keys(each) for each in (None, {}, {"memory": 0.5}, {"passing_reward": 0.5})]
    for stage in found[0]:
        different = len({each[stage] for each in found})
        assert different == (4 if stage in ("rollout", "collect") else 1), stage
