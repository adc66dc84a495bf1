"""Which stages are done otherwise in a cautious iteration."""

from __future__ import annotations

from earl_core.deployment.stages import STAGES
from earl_core.dispatch import Manifest
from earl_core.guard.caution import caution_in_key
from earl_core.guard.decision import GUARD, Decision


def test_the_policys_update_is_cautious_and_the_critics_is_as_ever() -> None:
    told = {GUARD: Decision(cautious=True).model_dump(mode="json")}
    given = {"run": "r", "iteration": 1, "key": "k", "policy_version": 1}
    read = [Manifest(**given, stage="advantage", outputs=told)]
    assert [stage for stage in STAGES if caution_in_key(stage, read)] == ["update"]
    assert not caution_in_key("update", [])
