"""What Prefect's server refuses as parameters, before it stores them."""

from __future__ import annotations

import pytest
from prefect.utilities.schema_tools.validation import is_valid, validate

from flows.evaluate import evaluate
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
