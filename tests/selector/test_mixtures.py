"""What the selector says of mixtures of experts and of models with states."""

from __future__ import annotations

import json
import math

import pytest
from typer.testing import CliRunner

from earl_core.config.feasibility import tensor_problem
from earl_core.config.rollout import VllmConfig
from earl_core.config.stages import StagesConfig, UpdateStage
from earl_core.deployment.layer_shapes import LatentShape
from earl_core.deployment.shapes import ModelShape
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.selector.choice.explain import PlannedLoad, ask, plan_rows
from earl_core.selector.choice.policy import select
from earl_core.selector.choice.prediction import NoFeasiblePlan
from earl_core.selector.choice.selection import SelectionInput
from earl_core.selector.model.activations import layer_activation_bytes, mean_activation_bytes
from earl_core.selector.model.candidates import memory_model, training_candidates
from earl_core.selector.model.catalogue import MODELS
from earl_core.selector.model.devices import DEVICES, cluster
from earl_core.selector.model.memory import TrainingNeeds
from earl_core.selector.model.memory_model import MemoryModel, kv_bytes_per_token
from earl_core.selector.model.roofline import Load, Roofline
from flows.cli.app import app

GPUS = cluster("h100-80gb", 1, 8)
QWEN, GLM = MODELS["qwen3-30b-a3b"], MODELS["glm-4.5-air"]
HYBRID = MODELS["qwen3.5-9b"]


def test_the_bytes_of_a_token_by_hand() -> None:
    heads = 2 * 2 * (4096 + 512) + 4 * 32 + 6 * (4096 + 512)
    experts = 2 * 8 * (2 * 2048 + 4 * 768) + 4 * 128
    assert layer_activation_bytes(QWEN) == 16 * 2048 + heads + experts
    # One of GLM's 46 layers is dense, 10,944 wide.
    dense, routed = 8 * 10944, 2 * (8 * 2 * 4096 + 4 * 9 * 1408) + 4 * 128
    difference = layer_activation_bytes(GLM) - mean_activation_bytes(GLM)
    assert difference == pytest.approx((routed - dense) / 46)


def test_all_experts_are_held_and_those_of_a_layer_gathered() -> None:
    mesh = StageDeployment("update", shard=8, max_tokens_per_microbatch=16384)
    lean = mesh._replace(activation_checkpointing="full")
    memory = memory_model(QWEN, GPUS).training(lean, 0, TrainingNeeds())
    state = memory_model(QWEN, GPUS).state(lean, mixed=True)
    assert state.total == 16 * QWEN.parameters / 8
    # This layer's copy, the next one in its buffer; gradients of all experts in bf16 beside the
    # float32 sum of the layer before.
    assert memory.weights - state.weights == 2 * 2 * QWEN.largest_layer()
    experts = 128 * 3 * 2048 * 768
    held = memory.gradients - state.gradients
    assert 4 * QWEN.largest_layer() <= held <= 4 * QWEN.largest_layer() + 2 * experts
    # The routing of 48 layers x 8 experts is a byte each.
    assert QWEN.routing is not None
    assert QWEN.routing.token_bytes == 384


def test_divided_experts_lie_once_on_all_their_ranks() -> None:
    memory = memory_model(QWEN, GPUS)
    experts = 48 * 128 * 3 * 2048 * 768
    others = QWEN.parameters - experts
    copies = StageDeployment("update", 8, expert_parallel=8, max_tokens_per_microbatch=16384)
    # Eight whole copies of all but the experts, of which there is one.
    assert memory.state(copies, mixed=True).total == 16 * (others + experts / 8)
    assert memory.state(copies._replace(replicas=16), mixed=True) == memory.state(copies, True)
    mesh = copies._replace(replicas=2, shard=4)
    assert memory.state(mesh, mixed=True).total == 16 * (others / 4 + experts / 8)
    # A rank that computes a layer gathers its sixteen experts of it.
    wide = mesh._replace(activation_checkpointing="full")
    whole = wide._replace(expert_parallel=1)
    gathered, needs = [], TrainingNeeds()
    for each in (wide, whole):
        found = memory.training(each, 0, needs)._replace(logits=0.0)
        gathered.append(found.weights - memory.state(each, mixed=True).weights)
    assert gathered[1] - gathered[0] == 2 * 2 * 112 * 3 * 2048 * 768
    assert QWEN.largest_layer() - QWEN.largest_layer(8) == 112 * 3 * 2048 * 768


def test_a_state_does_not_grow_with_the_context() -> None:
    memory = memory_model(HYBRID, GPUS)
    short, long = (memory.torch_engine(4, length, 2) for length in (1024, 32768))
    # 24 layers: 32 heads of [128, 128] in float32, and four tokens of 8,192 numbers in bf16.
    state = 24 * (4 * 32 * 128 * 128 + 2 * 8192 * 4)
    assert short.states == long.states == 1.5 * 4 * state
    # Eight layers have keys and values, 4 heads of 256 each.
    assert HYBRID.kv_bytes_per_token() == 8 * 2 * 2 * 4 * 256
    assert long.kv_cache == 32 * short.kv_cache == 1.5 * 4 * 32768 * HYBRID.kv_bytes_per_token()
    engine = StageDeployment("rollout", 1, 2, max_running_requests=64)
    held = memory.vllm(engine, VllmConfig())
    assert held.states == 64 * state / 2
    more = memory.vllm(engine._replace(max_running_requests=128), VllmConfig())
    assert more.kv_cache < held.kv_cache - 64 * state / 2


def test_latents_are_cached_once_for_all_heads() -> None:
    latent = LatentShape(
        query_rank=1536, key_value_rank=512, rope_dim=64, plain_dim=128, value_dim=128
    )
    shape = ModelShape(
        model_type="deepseek_v3",
        hidden_size=7168,
        layers=61,
        attention_heads=128,
        key_value_heads=128,
        vocabulary=129280,
        max_positions=4096,
        latent=latent,
    )
    assert kv_bytes_per_token(shape, 8) == kv_bytes_per_token(shape, 1) == 61 * 2 * 576
    # The torch engine keeps whole keys and values.
    cached = MemoryModel(shape, DEVICES["h100-80gb"], GPUS).torch_engine(1, 1000, 2).kv_cache
    assert cached == 1.5 * 1000 * 61 * 2 * 128 * (192 + 128)


def test_a_decoding_step_reads_the_experts_that_its_tokens_are_given() -> None:
    device = DEVICES["h100-80gb"]
    free = device.model_copy(update={"layer_seconds": 0.0})
    roofline = Roofline(QWEN, free, GPUS)
    one, two, many, more = (roofline.decode_step(1, 1, n, 1.0) for n in (1, 2, 16, 32))
    expert = 2 * 48 * 3 * 2048 * 768 / device.memory_bandwidth
    token = kv_bytes_per_token(QWEN, 1) / device.memory_bandwidth
    assert two - one == pytest.approx(8 * expert + token)
    # 16 tokens may have all 128.
    assert more - many == pytest.approx(16 * token)
    read = 2 * (QWEN.active_parameters - QWEN.embedding_parameters) / device.memory_bandwidth
    assert one == pytest.approx(read + token)


def test_training_computes_with_what_works_and_moves_all() -> None:
    load = Load(64, 4096.0, 4096.0, 2048.0)
    lone = StageDeployment("update", max_tokens_per_microbatch=16384)
    free = DEVICES["h100-80gb"].model_copy(update={"layer_seconds": 0.0, "memory_bandwidth": 1e18})
    seconds = Roofline(QWEN, free, GPUS).training_seconds(lone, load, 1, 1)
    attention = 2 * 48 * 4096 * 4096
    flops = 3 * 64 * 4096 * (2 * QWEN.active_parameters + attention)
    assert seconds == pytest.approx(flops / free.flops, rel=1e-5)
    # Twice the context costs a model with states less than twice the attention in eight layers.
    hybrid = Roofline(HYBRID, free, GPUS)
    short, long = (
        hybrid.training_seconds(lone, load._replace(context=n), 1, 1) / n for n in (4096, 8192)
    )
    added = 3 * 64 * 2 * 8 * 4096 * 4096 / free.flops
    assert long - short == pytest.approx(added, rel=1e-5)


def test_tokens_travel_to_divided_experts_and_fewer_experts_to_tokens() -> None:
    load, device = Load(64, 4096.0, 4096.0, 2048.0), DEVICES["h100-80gb"]
    slow = device.model_copy(update={"flops": 1e30, "layer_seconds": 0.0, "nccl": False})
    slow = slow.model_copy(update={"memory_bandwidth": 1e30, "link_bandwidth": 1e9})
    roofline = Roofline(QWEN, slow, GPUS)
    whole = StageDeployment("update", 2, shard=4, max_tokens_per_microbatch=8 * 4096)
    divided = whole._replace(expert_parallel=8)
    experts = 48 * 128 * 3 * 2048 * 768
    others = QWEN.parameters - experts
    # Each rank has 8 samples, a microbatch: weights come twice in 2 bytes, gradients once in 4;
    # between replicas gradients go there and back. No two ranks share parts of an expert.
    moved = 8 * others * 3 / 4 + 8 * others / 4 / 2
    # Rows for eight experts, forth and back, forward and backward, in 48 layers.
    rows = 48 * 4 * 2 * 8 * 4096 * 8 * 2048 * 7 / 8
    seconds = roofline.training_seconds(divided, load, 1, 1)
    assert seconds == pytest.approx((moved + rows) / 1e9, rel=1e-6)
    more = 8 * experts * 3 / 4 + 8 * experts / 4 / 2
    alike = roofline.training_seconds(whole, load, 1, 1)
    assert alike == pytest.approx((moved + more) / 1e9, rel=1e-6)
    again = divided._replace(activation_checkpointing="full")
    longer = roofline.training_seconds(again, load, 1, 1)
    assert longer - seconds == pytest.approx(rows / 2 / 1e9, rel=1e-6)
    # An engine has to gather experts even from ranks that share nothing else.
    engine, copies = StageDeployment("rollout", 8), StageDeployment("update", 8)
    assert roofline.republish_seconds(copies, engine) == 0
    assert roofline.republish_seconds(copies._replace(expert_parallel=8), engine) > 0


def test_ranks_that_would_cut_experts_or_states_are_not_offered() -> None:
    assert "experts are not split" in tensor_problem(QWEN, 2, engine=False)
    assert "state are not split" in tensor_problem(HYBRID, 2, engine=False)
    assert not tensor_problem(QWEN, 4, engine=True)
    assert "expert width of 768" in tensor_problem(
        QWEN.model_copy(update={"attention_heads": 512, "key_value_heads": 512}), 512, engine=True
    )
    offered, out = training_candidates("update", HYBRID, GPUS, 64, 8192)
    assert {(each.tensor_parallel, each.context_parallel) for each in offered} == {(1, 1)}
    assert any("layers with a state need all of a sample" in each.reason for each in out)


def asked(name: str, hosts: int = 1, policy: str = "live_tokens") -> SelectionInput:
    given = ask(MODELS[name], cluster("h100-80gb", hosts, 8), PlannedLoad(16384, 128))
    selector = given.selector.model_copy(update={"policy": policy})
    return given.model_copy(update={"selector": selector})


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "mixtral-8x7b", "qwen3.5-35b-a3b"])
def test_a_mixture_has_a_plan_with_predictions(name: str) -> None:
    plan = select(asked(name))
    assert plan["update"].tensor_parallel == 1
    assert plan["update"].parts == 8
    for predicted in plan.predictions.values():
        assert math.isfinite(predicted.seconds)
        assert predicted.peak_bytes <= predicted.budget_bytes


def test_fixed_does_not_run_a_mixture_blind() -> None:
    predicted = select(asked("qwen3-30b-a3b", policy="fixed")).predictions
    assert predicted["update"].peak_bytes > 16 * QWEN.parameters / 8
    # 16 bytes x 106.9 B over eight devices.
    with pytest.raises(NoFeasiblePlan, match=r"alone take 199\.0 GiB of each device"):
        select(asked("glm-4.5-air", policy="fixed"))


def test_fixed_takes_a_degree_that_makes_room_and_predicts_it() -> None:
    given = asked("qwen3-30b-a3b", policy="fixed")
    whole, divided = (
        given.model_copy(
            update={
                "stages": StagesConfig(
                    update=UpdateStage(replicas=2, shard=4, expert_parallel=degree)
                )
            }
        )
        for degree in (1, 8)
    )
    with pytest.raises(NoFeasiblePlan, match=r"alone take 113\.\d GiB of each device"):
        select(whole)
    plan = select(divided)
    (row,) = (row for row in plan_rows(plan) if row["stage"] == "update")
    assert "shard 4, EP 8 x 2" in row["stage deployment"]
    assert row["seconds"]
    assert plan.predictions["update"].peak_bytes > 16 * QWEN.parameters / 8


def test_earl_plan_says_what_fits_and_why() -> None:
    for place, each in (("1x8xh100-80gb", "61.1 GB on each of 8"), ("2x8xh100-80gb", "30.5 GB")):
        line = ["plan", "--model", "qwen3-30b-a3b", "--hardware", place, "--context", "16K"]
        result = CliRunner().invoke(app, [*line, "--explain"])
        text = " ".join(result.output.split())
        assert result.exit_code == 0, text
        assert "16 bytes x 30.5 B parameters, 488.5 GB" in text
        assert each in text
        assert "3.35 B of them work: 8 of a layer's 128 experts" in text
        assert "experts are not split over tensor-parallel ranks in training" in text
        assert "1.25 GB in bf16, or with expert_parallel 8 its share, 0.19 GB" in text
    line[line.index("qwen3-30b-a3b")] = "glm-4.5-air"
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 2
    assert "infeasible: no stage deployment of the update fits" in " ".join(result.output.split())
    found = CliRunner().invoke(
        app, ["plan", "--model", "qwen3.5-9b", "--hardware", "8xh100", "--json"]
    )
    assert json.loads(found.output)[0]["model"] == "qwen3.5-9b"
