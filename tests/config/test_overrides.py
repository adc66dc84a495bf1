"""Overrides that cannot be used are blamed on the command line, and the file for its own faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from earl_core.config import ConfigError, load_config
from tests.config.test_config import MINIMAL


def refused(file: Path, settings: dict[str, Any], *overrides: str) -> list[str]:
    file.write_text(yaml.safe_dump(settings))
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    return str(caught.value).splitlines()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


@pytest.mark.parametrize("override", ["a", "a..b=1", "name.x=1", "=1", "a=[1"])
def test_what_is_no_override(file: Path, override: str) -> None:
    assert f"the override {override!r}" in refused(file, MINIMAL, override)[0]


@pytest.mark.parametrize("bad", ["rollout.grup_size=4", "rollout.group_size=-1", "rollout=3"])
def test_a_wrong_override_is_named(file: Path, bad: str) -> None:
    told = refused(file, MINIMAL, "iterations=3", bad)
    assert told[0] == f"the override {bad!r} for {file} cannot be used:"


def test_each_problem_is_said_of_where_it_stands(file: Path) -> None:
    told = refused(file, MINIMAL | {"surplus": 1}, "rollout.grup_size=4", "iterations=3")
    assert told[0] == f"the override 'rollout.grup_size=4' for {file} cannot be used:"
    assert told[2] == f"{file} cannot be used:"
    assert [each.split(":")[0].strip() for each in told[1::2]] == ["rollout.grup_size", "surplus"]
    alone = refused(file, MINIMAL | {"surplus": 1}, "iterations=3")
    assert alone[0] == f"{file} cannot be used:"


def test_settings_that_do_not_go_together_are_said_of_what_brings_them_together(file: Path) -> None:
    told = refused(file, MINIMAL, "schedule.mode=stream")
    assert told[0] == f"the override 'schedule.mode=stream' for {file} cannot be used:"
    told = refused(file, MINIMAL | {"schedule": {"mode": "stream"}}, "iterations=3")
    assert told[0] == f"{file} cannot be used:"
