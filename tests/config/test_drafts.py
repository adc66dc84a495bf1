"""Drafts where they are not to be had."""

from __future__ import annotations

from typing import Any

import pytest

from earl_core.config import ConfigError
from earl_core.config.load import parse_config
from earl_core.config.rollout import DraftsConfig
from tests.config.test_config import with_


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"rollout__engine": "vllm", "model__adapter": {"rank": 4}},
            "beside a model.adapter: set rollout.engine to `torch`, or leave",
        ),
        ({"update": {"deterministic": True}}, "update.deterministic .* leave one of them out"),
        ({"rollout__drafts": {"most_tokens": 33}}, "rollout.drafts.most_tokens"),
        ({"rollout__drafts": {"memory_bytes": 1000}}, "rollout.drafts.memory_bytes"),
        ({"rollout__drafts": {"tokens": 3}}, "rollout.drafts.tokens"),
    ],
)
def test_what_has_no_drafts_is_refused(given: dict[str, Any], message: str) -> None:
    asked = {"rollout__engine": "torch", "rollout__drafts": {}}
    for engine in ("torch", "vllm"):
        allowed = parse_config(with_(**(asked | {"rollout__engine": engine})))
        assert allowed.rollout.drafts == DraftsConfig()
    with pytest.raises(ConfigError, match=message):
        parse_config(with_(**(asked | given)))
