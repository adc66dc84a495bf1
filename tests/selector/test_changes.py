"""Lines about what one plan changes against the one before."""

from __future__ import annotations

from typing import Any

import pytest

from earl_core.config.selector import SelectorConfig
from earl_core.deployment.plan import DeploymentPlan
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.selector.choice.changes import infeasible_text, stage_changes
from earl_core.selector.choice.policy import select
from earl_core.selector.choice.selection import Statistics
from earl_core.selector.profile.observations import Observation
from tests.selector.examples import given

UPDATE = StageDeployment(stage="update", threads=2, max_tokens_per_microbatch=8192)
ROLLOUT = StageDeployment(stage="rollout", max_model_len=4096, max_running_requests=64)


def plan(reason: str = "", **stages: StageDeployment) -> DeploymentPlan:
    laid_out = {"rollout": ROLLOUT, "update": UPDATE, **stages}
    return DeploymentPlan(iteration=3, stages=laid_out, reasons=dict.fromkeys(laid_out, reason))


@pytest.mark.parametrize(
    ("stage", "fields", "reason", "line"),
    [
        (
            "update",
            {"max_tokens_per_microbatch": 4096, "activation_checkpointing": "full"},
            "it ran out of memory in this run",
            "update: TP 1, microbatch 8192 -> 4096, checkpointing: it ran out of memory in this "
            "run",
        ),
        (
            "update",
            {"activation_checkpointing": "selective"},
            "",
            "update: TP 1, selective checkpointing",
        ),
        (
            "rollout",
            {"tensor_parallel": 8},
            "TP 1 → 8: 16 sequences fill 96 % of the cache",
            "rollout: TP 1 -> 8: 16 sequences fill 96 % of the cache",
        ),
        (
            "rollout",
            {"max_model_len": 8192},
            "1 engine: as configured; context raised from 4096 to 8192: episodes reached 3500 "
            "tokens",
            "rollout: TP 1, context 4096 -> 8192: episodes reached 3500 tokens",
        ),
        (
            "rollout",
            {"replicas": 2, "max_running_requests": 0},
            "faster",
            "rollout: TP 1, engines 1 -> 2, running 64 -> any: faster",
        ),
        (
            "update",
            {"logits_chunk_tokens": 1024, "offload_optimizer": True},
            "",
            "update: TP 1, optimizer offloaded, logits by 1024",
        ),
    ],
)
def test_a_change_is_one_line(stage: str, fields: dict[str, Any], reason: str, line: str) -> None:
    before = {"rollout": ROLLOUT, "update": UPDATE}[stage]
    after = plan(reason, **{stage: before._replace(**fields)})
    (change,) = stage_changes(plan(), after)
    assert change.text == line
    assert change.switched == (set(fields) != {"max_model_len"})


def test_means_given_up_are_named_too() -> None:
    careful = UPDATE._replace(activation_checkpointing="full", logits_chunk_tokens=512)
    (change,) = stage_changes(plan(update=careful), plan())
    assert change.text == "update: TP 1, no checkpointing, all logits at once"


def test_nothing_changed_and_nothing_before() -> None:
    assert stage_changes(plan(), plan("other words")) == []
    assert stage_changes(None, plan()) == []


def test_an_infeasible_stage_says_why() -> None:
    memory = Observation(
        iteration=3, stage="update", kind="out_of_memory", deployment=UPDATE, peak_bytes=2**30
    )
    assert infeasible_text(memory) == (
        "update: ran out of memory at 1.0 GiB a device under TP 1, 2 threads, microbatch 8192; "
        "the stage is repeated from its sealed inputs"
    )
    context_overflow = Observation(
        iteration=3, stage="rollout", kind="context_overflow", deployment=ROLLOUT, longest=4096
    )
    assert "an episode reached 4,096 tokens" in infeasible_text(context_overflow)
    unanswered = memory.model_copy(update={"answered": False})
    assert "repeated" not in infeasible_text(unanswered)


def test_a_longer_context_has_a_reason_that_is_true() -> None:
    growing = given((1000.0, 1500.0, 2000.0, 2500.0), rollout={"max_model_len": 5120})
    resting = growing.model_copy(update={"selector": SelectorConfig(policy="average_context")})
    for item, length, why in (
        (growing, 20480, "episodes reached 5000 tokens and are expected to reach 9000"),
        (resting, 10240, "episodes reached 5000 tokens"),
    ):
        chosen = select(item)
        assert chosen["rollout"].max_model_len == length
        assert chosen.reasons["rollout"].endswith(f"context raised from 5120 to {length}: {why}")
        before = chosen["rollout"]._replace(max_model_len=5120)
        earlier = chosen.model_copy(update={"stages": {**chosen.stages, "rollout": before}})
        (change,) = stage_changes(earlier, chosen)
        assert change.text.endswith(f"context 5120 -> {length}: {why}")


def test_engines_are_first_built_for_the_context_that_is_configured() -> None:
    item = given(rollout={"max_model_len": 1024}).model_copy(update={"statistics": Statistics()})
    chosen = select(item)
    assert chosen["rollout"].max_model_len == 1024
    assert "raised" not in chosen.reasons["rollout"]
