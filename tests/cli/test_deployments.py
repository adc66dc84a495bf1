"""The deployments, and `prefect.yaml`, which says the same to `prefect deploy`."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import yaml

from earl_core.config import load_config
from flows.deployments import deployments
from tests.cli.conftest import ROOT

DEPLOYMENTS: list[dict[str, Any]] = yaml.safe_load((ROOT / "prefect.yaml").read_text())[
    "deployments"
]


@pytest.mark.parametrize("item", DEPLOYMENTS, ids=lambda item: item["name"])
def test_a_deployment_names_a_flow_and_parameters_that_it_takes(item: dict[str, Any]) -> None:
    # A module path: of a file's path Prefect would put the folder first, `flows/profile.py` before
    # Python's own module of that name.
    module, _, name = item["entrypoint"].partition(":")
    assert "/" not in module
    found = getattr(importlib.import_module(module), name)
    assert found.name == item["name"]
    parameters = inspect.signature(found.fn).parameters
    assert set(item["parameters"]) <= set(parameters)
    required = {n for n, p in parameters.items() if p.default is inspect.Parameter.empty}
    assert required <= set(item["parameters"])
    # What a form shows for each of them.
    assert found.parameters.model_dump()["properties"].keys() == parameters.keys()
    config = item["parameters"].get("config")
    assert config is None or load_config(config)


def test_the_project_file_says_what_earl_up_deploys() -> None:
    assert [item.project_entry() for item in deployments()] == DEPLOYMENTS
    assert {item["name"] for item in DEPLOYMENTS} >= {"train", "iteration", "evaluate"}


def test_runs_elsewhere_are_found_there() -> None:
    for item in deployments("/data/runs"):
        given = item.parameters
        assert given.get("run", "/data/runs/").startswith("/data/runs/")
        assert "run" in given or given["overrides"] == ['runs_directory="/data/runs"']


def test_a_directory_of_runs_is_one_text_whatever_its_name_is() -> None:
    for name in ("/data/runs # old", "/data/a: b", "/data/runs"):
        (train, *_) = deployments(name)
        assert load_config("tictactoe_tiny", train.parameters["overrides"]).runs_directory == name


def test_names_are_unique_and_a_profile_has_its_minutes() -> None:
    names = [item["name"] for item in DEPLOYMENTS]
    assert sorted(set(names)) == sorted(names), "of two with one name the second replaces the first"
    profile = DEPLOYMENTS[names.index("profile")]
    assert profile["parameters"]["minutes"] == 20
