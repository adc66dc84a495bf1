"""Which stages are done otherwise in a cautious iteration."""

from __future__ import annotations

from earl_core.config import load_config
from earl_core.deployment.stages import STAGES
from earl_core.dispatch import Manifest
from earl_core.guard.caution import caution_in, caution_in_key, caution_text
from earl_core.guard.decision import GUARD, Decision


def test_the_policys_update_is_cautious_and_the_critics_is_as_ever() -> None:
    told = {GUARD: Decision(cautious=True).model_dump(mode="json")}
    given = {"run": "r", "iteration": 1, "key": "k", "policy_version": 1}
    read = [Manifest(**given, stage="advantage", outputs=told)]
    assert [stage for stage in STAGES if caution_in_key(stage, read)] == ["update"]
    assert not caution_in_key("update", [])


def test_a_branch_is_more_cautious_and_its_key_says_so() -> None:
    told = {GUARD: Decision(cautious=True, branch_caution=2).model_dump(mode="json")}
    read = [Manifest(run="r", iteration=1, key="k", policy_version=1, stage="a", outputs=told)]
    assert caution_in(read) == 3
    assert caution_in_key("update", read) == ["cautious"] * 3
    kl = load_config("tictactoe_tiny", ["algorithm.kl={placement: loss, coefficient: 0.01}"])
    assert caution_text(kl, 3) == "cautious: the learning rate is x 0.027, the KL coefficient x 27"
