"""The forms of the flows, and what Prefect's server refuses before it stores it."""

from __future__ import annotations

import pytest
from prefect.utilities.schema_tools.validation import is_valid, validate

from earl_core.config.load import recipe_names
from flows.evaluate import evaluate
from flows.iteration import iteration
from flows.profile import profile
from flows.train import train
from tests.config.test_secrets import KEY, TOKEN

REFUSED = (
    "environment.options.api_key=swordfish",
    "environment.options.AWS_SECRET_ACCESS_KEY=swordfish",
    "environment.options.token=swordfish",
    "environment.options.hf_token = swordfish",
    "model.builder_options.password=swordfish",
    "dispatch.spill_url=s3://me:swordfish@bucket/x",
    f"environment.options.anything={KEY}",
    f"environment.options.anything={TOKEN}",
)
TAKEN = (
    "environment.options.api_key=env:MY_KEY",
    "environment.options.password=file:/run/secrets/x",
    "environment.options.eos_token=<|im_end|>",
    "rollout.max_tokens_per_turn=16",
    "update.max_tokens_per_microbatch=256",
    "environment.options.key=up",
    "dispatch.spill_url=s3://bucket/x",
    "algorithm.advantage=rloo",
)


@pytest.mark.parametrize("flow", [train, profile, evaluate], ids=lambda flow: flow.name)
def test_overrides_with_secrets_are_refused_by_the_schema(flow: object) -> None:
    schema = flow.parameters.model_dump()  # type: ignore[attr-defined]
    common = {"config": "demo", "run": "runs/demo"}
    given = {name: common[name] for name in common if name in schema["properties"]}
    for override in REFUSED:
        assert validate({**given, "overrides": [override]}, schema), override
    for override in TAKEN:
        assert is_valid({**given, "overrides": [override]}, schema), override


@pytest.mark.parametrize("flow", [train, iteration, profile, evaluate], ids=lambda flow: flow.name)
def test_every_field_of_a_form_explains_itself(flow: object) -> None:
    schema = flow.parameters.model_dump()  # type: ignore[attr-defined]
    for name, field in schema["properties"].items():
        assert field["title"][0].isupper(), name
        assert field["description"].rstrip().endswith("."), name
        for choice in field.get("anyOf", ()):
            assert choice.get("title"), name
    common = {"run": "runs/demo"} if "run" in schema["properties"] else {}
    defaults = {
        name: field["default"] for name, field in schema["properties"].items() if "default" in field
    }
    assert is_valid({**defaults, **common}, schema)


def test_recipes_and_checkpoints_are_chosen_from_lists_or_typed() -> None:
    form = train.parameters.properties["config"]
    assert form["anyOf"][0]["enum"] == recipe_names()
    schema = train.parameters.model_dump()
    assert is_valid({"config": "my/own.yaml"}, schema)
    schema = evaluate.parameters.model_dump()
    for checkpoint in ("last", "best", "initial", "12", "worst"):
        given = {"run": "runs/demo", "checkpoint": checkpoint}
        assert is_valid(given, schema) == (checkpoint != "worst")
