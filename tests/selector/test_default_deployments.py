"""Stages that a run file leaves open: on all GPUs, by rules that need no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from earl_core.config import RunConfig, parse_config
from earl_core.config.feasibility import check_stages
from earl_core.config.stages import StagesConfig
from earl_core.deployment.plan import DeploymentPlan, Forbidden
from earl_core.deployment.shapes import Hardware
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.selector.choice.policy import select
from earl_core.selector.choice.prediction import NoFeasiblePlan
from earl_core.selector.choice.selection import SelectionInput, Statistics
from earl_core.selector.model.catalogue import MODELS
from earl_core.selector.model.devices import cluster
from tests.config.test_config import with_

SEEN = Statistics(context_mean=(700.0,), context_max=(900.0,))


def config(**stages: Any) -> RunConfig:
    sizes = {"rollout__prompts_per_iteration": 64, "rollout__max_model_len": 8192}
    return parse_config(with_(stages=stages, rollout__engine="vllm", **sizes))


def plan(model: str, hardware: Hardware, **stages: Any) -> DeploymentPlan:
    made, shape = config(**stages), MODELS[model]
    check_stages(made, shape, hardware)
    return select(SelectionInput.of(made, hardware, shape))


@pytest.mark.parametrize(
    ("model", "hosts", "engines", "mesh"),
    [
        ("qwen2.5-0.5b", 1, (8, 1), (1, 8)),
        ("qwen2.5-7b", 1, (8, 1), (1, 8)),
        # Two hosts: a copy of the parameters on each, and where that is too large one on both.
        ("qwen2.5-7b", 2, (16, 1), (2, 8)),
        ("qwen3-32b", 2, (8, 2), (1, 16)),
        ("qwen2.5-72b", 2, (4, 4), (1, 16)),
    ],
)
def test_without_stages_all_gpus_are_used(
    model: str, hosts: int, engines: tuple[int, int], mesh: tuple[int, int]
) -> None:
    made = plan(model, cluster("h100-80gb", hosts, 8))
    assert made["rollout"][1:3] == engines
    assert made["update"].axes == (*mesh, 1, 1)
    assert made["rollout"].ranks == made["update"].ranks == 8 * hosts
    assert made.reasons["update"].endswith(f"spread over all {8 * hosts} GPUs, as `stages` leaves "
                                           "it open")  # fmt: skip


@pytest.mark.parametrize(
    ("device", "model", "size"),
    [
        ("h100-80gb", "qwen2.5-1.5b", 16384),
        ("h100-80gb", "qwen2.5-3b", 4096),
        ("rtx-4090", "qwen2.5-0.5b", 8192),
    ],
)
def test_an_open_token_budget_is_the_most_that_a_gpu_holds(
    device: str, model: str, size: int
) -> None:
    made, hardware = config(), cluster(device, 1, 1)
    asked = SelectionInput.of(made, hardware, MODELS[model], statistics=SEEN)
    first = select(asked)["update"]
    assert first.max_tokens_per_microbatch == size
    # A formula may err: what ran out of memory is not taken again, but half of it.
    failed = Forbidden(deployment=first, beyond_bytes=1.0)
    again = select(asked.model_copy(update={"forbidden": (failed,)}))["update"]
    assert again == first._replace(max_tokens_per_microbatch=size // 2)
    given = made.update.model_copy(update={"max_tokens_per_microbatch": 3000})
    named = asked.model_copy(update={"update": given})
    assert select(named)["update"].max_tokens_per_microbatch == 3000


def test_fixed_says_what_cannot_fit_whatever_the_load() -> None:
    """16 bytes a parameter over 8 devices, or 2 in one engine; with a margin below nothing is
    said: the usual mesh of 72B parameters on 16 devices takes 68 GiB of 80."""
    hardware = cluster("h100-80gb", 1, 8)
    with pytest.raises(NoFeasiblePlan, match=r"alone take 135\.4 GiB of each device") as update:
        plan("qwen2.5-72b", hardware)
    assert "shard x context_parallel of 14 at least" in str(update.value)
    with pytest.raises(NoFeasiblePlan, match=r"stages\.rollout needs tensor_parallel of 2"):
        plan("qwen2.5-72b", cluster("h100-80gb", 2, 8), rollout={"tensor_parallel": 1})
    assert plan("qwen2.5-72b", cluster("h100-80gb", 2, 8))["update"].shard == 16


def test_a_stage_that_is_laid_out_stays_so() -> None:
    hardware = cluster("h100-80gb", 1, 8)
    made = plan("qwen2.5-7b", hardware, update={"shard": 4})
    assert (made["rollout"].replicas, made["update"].ranks) == (8, 4)
    assert "as configured" in made.reasons["update"]
    # An empty section is one rank, as every field that is left out is at its default.
    assert plan("qwen2.5-7b", hardware, rollout={})["rollout"].ranks == 1


def test_separate_stages_share_the_gpus() -> None:
    hardware = cluster("h100-80gb", 1, 8)
    halves = plan("qwen2.5-7b", hardware, placement="separate")
    assert (halves["rollout"].ranks, halves["update"].ranks) == (4, 4)
    rest = plan("qwen2.5-7b", hardware, placement="separate", rollout={"replicas": 6})
    assert (rest["rollout"].ranks, rest["update"].axes) == (6, (1, 2, 1, 1))


def test_small_runs_leave_no_engine_and_no_rank_idle() -> None:
    hardware = cluster("h100-80gb", 1, 8)
    few = parse_config(
        with_(rollout__engine="vllm", rollout__prompts_per_iteration=2, rollout__group_size=3)
    )
    made = select(SelectionInput.of(few, hardware, MODELS["qwen2.5-7b"]))
    # Wider engines instead of more of them; six episodes for four ranks.
    assert made["rollout"][1:3] == (2, 4)
    assert made["update"].ranks == 4
    torch = few.rollout.model_copy(update={"engine": "torch"})
    alone = few.model_copy(update={"rollout": torch})
    made = select(SelectionInput.of(alone, hardware, MODELS["qwen2.5-7b"]))
    assert made["rollout"][1:3] == (2, 1)


def test_a_machine_without_gpus_has_one_rank_of_each() -> None:
    made = plan("qwen2.5-0.5b", Hardware(cpu_cores=8, memory_bytes=2**36))
    assert (made["rollout"].ranks, made["update"].ranks) == (1, 1)
    assert StagesConfig().at(0) == (None, None)
    assert made["rollout"]._replace(max_model_len=0) == StageDeployment(
        "rollout", threads=8, max_running_requests=256
    )


def test_the_plan_of_a_question_uses_all_gpus_and_no_torch() -> None:
    script = (
        "import sys; from flows.cli.plan import explain_question as ask;"
        "ask('qwen2.5-7b', '8xh100', None, False, True, responses=128, running=256,"
        " engine_share=0.85, reference=False); assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    stages = json.loads(done.stdout)[0]["plan"]["stages"]
    for stage in ("rollout", "update"):
        made = StageDeployment(**stages[stage])
        assert made.ranks == 8
