"""The `stages` section: what it means, and what is refused with which words."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from earl_core.config import ConfigError, RunConfig, dump_config, parse_config
from earl_core.config.feasibility import check_stages, tensor_degrees
from earl_core.config.table import resolved_rows
from earl_core.deployment.layer_shapes import StateShape
from earl_core.deployment.shapes import Hardware, ModelShape
from earl_core.deployment.stage_deployment import move_between
from earl_core.selector.choice.policy import select
from earl_core.selector.choice.selection import SelectionInput
from tests.config.test_config import with_

CORES = Hardware(cpu_cores=4, memory_bytes=2**33)


def config(engine: str = "torch", **stages: Any) -> RunConfig:
    return parse_config(with_(stages=stages, rollout__engine=engine))


def shape(heads: int = 9, pairs: int = 3, width: int = 1536) -> ModelShape:
    return ModelShape(
        model_type="llama",
        hidden_size=64 * heads,
        layers=2,
        attention_heads=heads,
        key_value_heads=pairs,
        intermediate_size=width,
        vocabulary=100,
        max_positions=8192,
    )


@pytest.mark.parametrize(
    ("update", "why"),
    [
        (
            {"context_parallel": 2},
            "context_parallel is 2: its 3 layers with a state need all of a sample on one rank: "
            "use 1",
        ),
        (
            {"tensor_parallel": 2},
            "tensor_parallel is 2: its 3 layers with a state are not split over ranks that train: "
            "use 1",
        ),
    ],
)
def test_layers_with_a_state_are_not_divided(update: dict[str, int], why: str) -> None:
    released = {
        "model_type": "qwen3_next", "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 100,
        "num_attention_heads": 8, "full_attention_interval": 4, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    }  # fmt: skip
    named = {**released, "layer_types": [*["linear_attention"] * 3, "full_attention"]}
    for raw in (released, {"model_type": "qwen3_5", "text_config": named}):
        hybrid = ModelShape.from_config(raw)
        with pytest.raises(ConfigError, match=why):
            check_stages(config("torch", update=update), hybrid, CORES)
        check_stages(config("torch", update={"shard": 2}), hybrid, CORES)


def test_experts_are_divided_where_there_are_some() -> None:
    experts = shape().model_copy(update={"experts": 8, "model_type": "qwen3_moe"})
    divided = parse_config(with_(rollout__engine="vllm", rollout__vllm={"expert_parallel": True}))
    with pytest.raises(ConfigError, match=r"rollout\.vllm\.expert_parallel wants GPUs"):
        check_stages(divided, experts, CORES)
    with pytest.raises(ConfigError, match=r"rollout\.vllm\.expert_parallel.*leave it out"):
        check_stages(divided, shape(), CORES)


def test_drafts_beside_recorded_experts_are_refused_on_gpus_alone() -> None:
    experts = shape().model_copy(update={"experts": 8, "model_type": "qwen3_moe"})
    gpus = CORES.model_copy(update={"gpus": 2})
    drafted = {"rollout__engine": "vllm", "rollout__drafts": {}}
    check_stages(parse_config(with_(**drafted)), experts, CORES)
    check_stages(parse_config(with_(**drafted)), shape(), gpus)
    check_stages(parse_config(with_(**drafted, rollout__record_routing="off")), experts, gpus)
    with pytest.raises(ConfigError, match=r"drafts out, or set rollout\.record_rou"):
        check_stages(parse_config(with_(**drafted)), experts, gpus)


@pytest.mark.parametrize(
    ("experts", "update", "message"),
    [
        (8, {"replicas": 2, "shard": 2, "expert_parallel": 4}, ""),
        (8, {"replicas": 3, "shard": 2, "expert_parallel": 6}, "6 does not.*8 experts: use 1 or"),
        (8, {"shard": 3, "expert_parallel": 2}, "3 data-parallel ranks .*: use 1 or 3"),
        (8, {"shard": 2, "context_parallel": 4, "expert_parallel": 4}, "4 does not divide the 2"),
        (8, {"shard": 2, "tensor_parallel": 2, "expert_parallel": 2}, "set tensor_parallel to 1"),
        (
            0,
            {"shard": 2, "expert_parallel": 2},
            r"stages\.update\.expert_parallel is 2: .*no exper",
        ),
    ],
)
def test_experts_are_divided_evenly_over_data_parallel_ranks(
    experts: int, update: dict[str, Any], message: str
) -> None:
    cores = CORES.model_copy(update={"cpu_cores": 8})
    given = shape().model_copy(update={"experts": experts, "model_type": "qwen3_moe"})
    if not message:
        check_stages(config(update=update), given, cores)
        return
    with pytest.raises(ConfigError, match=message):
        check_stages(config(update=update), given, cores)


def test_another_degree_of_experts_is_a_live_reshard_of_the_same_ranks() -> None:
    stages = config(
        update={"replicas": 2, "shard": 4},
        changes=[{"iteration": 1, "update": {"replicas": 2, "shard": 4, "expert_parallel": 2}}],
    ).stages
    before, after = (stages.at(iteration)[1] for iteration in (0, 1))
    assert before is not None
    assert after is not None
    assert move_between(before, after) == "reshard"
    assert before.ranks == after.ranks
    assert after.label == "TP 1, shard 4, EP 2 x 2"
    degrees = (1, 2, 4, 8)
    axes = [after._replace(expert_parallel=degree).expert_axes for degree in degrees]
    assert axes == [(2, 4, 1, 1), (2, 2, 1, 2), (2, 1, 1, 4), (1, 1, 1, 8)]
    assert after._replace(replicas=3, expert_parallel=6).expert_axes == (1, 2, 1, 6)


def test_tokens_go_to_experts_of_their_own_host() -> None:
    two = Hardware(cpu_cores=4, memory_bytes=2**33, hosts=2)
    experts = shape().model_copy(update={"experts": 8, "model_type": "qwen3_moe"})
    check_stages(config(update={"replicas": 2, "shard": 2, "expert_parallel": 2}), experts, two)
    with pytest.raises(ConfigError, match=r"their own host, and 4 .* its 2 .*: use 1 or 2"):
        check_stages(config(update={"replicas": 2, "shard": 2, "expert_parallel": 4}), experts, two)


def test_mixtures_that_vllm_was_not_proven_to_take_are_refused() -> None:
    experts = shape().model_copy(update={"experts": 8, "model_type": "deepseek_v3"})
    with pytest.raises(ConfigError, match=r"qwen3_moe only.*deepseek_v3.*rollout\.engine=torch"):
        check_stages(config("vllm"), experts, CORES)
    check_stages(config("torch"), experts, CORES)


def test_models_with_states_play_on_vllm_with_a_gpu_alone_and_without_drafts() -> None:
    carried = StateShape(layers=3, key_heads=2, value_heads=4, key_dim=8, value_dim=8, window=4)
    states = shape().model_copy(update={"model_type": "qwen3_5", "states": carried})
    gpus = Hardware(cpu_cores=4, memory_bytes=2**33, gpus=1, gpu_memory_bytes=2**36)
    with pytest.raises(ConfigError, match=r"qwen3_5 model without a GPU.*rollout\.engine=torch"):
        check_stages(config("vllm"), states, CORES)
    check_stages(config("vllm"), states, gpus)
    check_stages(config("torch"), states, CORES)
    for engine in ("torch", "vllm"):
        drafted = parse_config(with_(rollout__engine=engine, rollout__drafts={}))
        with pytest.raises(ConfigError, match=r"leave rollout\.drafts out"):
            check_stages(drafted, states, gpus)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({"updte": {}}, "stages.updte: unknown key"),
        ({"update": {"data_parallel": 2}}, "stages.update.data_parallel: unknown key"),
        ({"update": {"shard": 0}}, "stages.update.shard"),
        ({"update": {"replicate": 2}}, "`replicate` is called `replicas` now"),
        ({"rollout": {"shard": 2}}, "`shard` is a key of `stages.update`"),
        ({"update": {"threads": 2}}, "stages.update.threads: unknown key"),
        ({"update": 2}, "stages.update"),
        ({"placement": "apart"}, "no placement 'apart': choose from colocated, separate"),
        ({"rollout": {"tensor_parallel": 2}}, "runs on one device: choose `vllm`"),
        ({"rollout": {"replicas": 5}}, "some engines would stand idle"),
        ({"changes": [{"iteration": 3}]}, "the change at iteration 3 names no stage"),
        ({"changes": [{"iteration": 0, "update": {}}]}, "stages.changes.0.iteration"),
        (
            {"changes": [{"iteration": 5, "update": {}}, {"iteration": 2, "update": {}}]},
            "the change at iteration 2 stands after the one at 5",
        ),
        (
            {"changes": [{"iteration": 2, "rollout": {"tensor_parallel": 2}}]},
            "stages.changes.0.rollout.tensor_parallel is 2",
        ),
    ],
)
def test_bad_stage_deployments_say_what_to_change(stages: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**stages)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            {"update": {"tensor_parallel": 2}},
            "stages.update.tensor_parallel is 2: 2 does not divide the 9 attention heads: use 1 or "
            "3",
        ),
        ({"rollout": {"tensor_parallel": 2}}, "stages.rollout.tensor_parallel is 2: 2 does not"),
        (
            {"changes": [{"iteration": 2, "update": {"tensor_parallel": 4}}]},
            "stages.changes.0.update.tensor_parallel is 4",
        ),
        (
            {"update": {"replicas": 2, "shard": 2, "context_parallel": 2}},
            "8 devices; this machine has 4 CPU cores: lower a degree",
        ),
        (
            {"placement": "separate", "rollout": {"replicas": 2}, "update": {"shard": 3}},
            "asks for 2 engines on 2 devices and for 3 ranks, separate, which need 5 devices",
        ),
    ],
)
def test_what_model_or_machine_rule_out(stages: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_stages(config("vllm", **stages), shape(), CORES)
    assert message in str(caught.value)


def test_what_is_possible_is_let_through() -> None:
    check_stages(config("vllm", update={"tensor_parallel": 3}), shape(), CORES)
    both = {"rollout": {"replicas": 2}, "update": {"shard": 2}}
    check_stages(config(placement="separate", **both), shape(), CORES)
    check_stages(config(rollout={"replicas": 4}, update={"context_parallel": 4}), shape(), CORES)


def test_separate_devices_are_not_given_more_threads_than_there_are() -> None:
    raw = with_(stages={"placement": "separate"}, rollout__engine="torch", rollout__threads=3)
    check_stages(parse_config({**raw, "update": {"threads": 1}}), shape(), CORES)
    with pytest.raises(ConfigError, match="make 5 threads that work at the same time"):
        check_stages(parse_config({**raw, "update": {"threads": 2}}), shape(), CORES)


def test_engines_may_copy_key_value_heads_and_training_may_not() -> None:
    assert tensor_degrees(shape(8, 2, 64), engine=True) == [1, 2, 4, 8]
    assert tensor_degrees(shape(8, 2, 64), engine=False) == [1, 2]
    assert tensor_degrees(shape(12, 4, 64), engine=True) == [1, 2, 4]


def plan_of(settings: RunConfig, iteration: int, cores: int = 4) -> Any:
    return select(
        SelectionInput.of(
            settings,
            Hardware(cpu_cores=cores, memory_bytes=2**33),
            shape(8, 2),
            iteration=iteration,
            needs_reference=True,
        )
    )


def test_changes_hold_from_their_iteration_on() -> None:
    changed = config(
        "vllm",
        update={"replicas": 2, "logits_chunk_tokens": 64},
        changes=[
            {"iteration": 3, "update": {"tensor_parallel": 2, "offload_optimizer": True}},
            {"iteration": 5, "rollout": {"replicas": 2, "tensor_parallel": 2}},
        ],
    )
    before, middle, after = (plan_of(changed, iteration) for iteration in (2, 4, 5))
    assert (before["update"].replicas, before["update"].logits_chunk_tokens) == (2, 64)
    assert (middle["update"].replicas, middle["update"].tensor_parallel) == (1, 2)
    assert middle["update"].logits_chunk_tokens == 0
    assert middle["update"].offload_optimizer
    assert before["rollout"] == middle["rollout"]
    assert (after["rollout"].replicas, after["rollout"].tensor_parallel) == (2, 2)
    assert after["rollout"].world_size == after["update"].world_size == 2
    assert after["update"] == middle["update"]
    assert not after["reference"].offload_optimizer
    assert "from iteration 3 on" in after.reasons["update"]
    assert "TP 2 x 2, at most 256 running: as configured" in after.reasons["rollout"]


def test_cores_are_divided_unless_threads_are_given() -> None:
    two = {"rollout": {"replicas": 2}, "update": {"shard": 2}}
    plan = plan_of(config(**two), 0)
    assert (plan["rollout"].threads, plan["update"].threads) == (2, 2)
    apart = plan_of(config(placement="separate", **two), 0)
    assert (apart["rollout"].threads, apart["update"].threads) == (1, 1)
    assert plan_of(config(**two), 0, cores=2)["update"].threads == 1
    given = parse_config(with_(rollout__threads=3, update={"threads": 5}))
    plan = plan_of(given, 0)
    assert (plan["rollout"].threads, plan["update"].threads) == (3, 5)


def test_the_table_shows_the_stage_deployments() -> None:
    changed = config(
        update={"replicas": 2}, changes=[{"iteration": 9, "update": {"context_parallel": 2}}]
    )
    rows = {what: value for what, value, _ in resolved_rows(changed)}
    assert rows["stage deployment of the rollout"] == "all GPUs, or one rank without any"
    assert rows["stage deployment of the update"] == "TP 1 x 2"
    assert rows["from iteration 9 on"] == "update TP 1, CP 2"
    assert rows["devices of the two"] == "colocated"


def test_the_old_section_is_refused_by_its_new_name() -> None:
    with pytest.raises(ConfigError, match="the section `layout` is called `stages` now"):
        parse_config(with_(layout={"update": {"shard": 2}}))


def test_a_resolved_section_is_read_back() -> None:
    made = config(update={"shard": 2}, changes=[{"iteration": 9, "rollout": {"replicas": 2}}])
    assert parse_config(yaml.safe_load(dump_config(made))) == made
    written = made.model_dump(mode="json")["stages"]
    assert written["rollout"] is None
    assert written["changes"][0]["rollout"] == {"replicas": 2, "tensor_parallel": 1}
