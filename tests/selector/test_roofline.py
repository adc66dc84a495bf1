"""Seconds against figures computed by hand, and what must hold for any load."""

from __future__ import annotations

import math

import pytest
from hypothesis import given as examples
from hypothesis import strategies as st

from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.selector.model.catalogue import MODELS
from earl_core.selector.model.devices import DEVICES, cluster
from earl_core.selector.model.roofline import Load, Roofline

DEVICE, HARDWARE = DEVICES["h100-80gb"], cluster("h100-80gb", 16, 8)
QWEN = MODELS["qwen2.5-72b"]


def roofline(latency: bool = True) -> Roofline:
    return Roofline(QWEN, DEVICE.model_copy(update={"nccl": latency}), HARDWARE)


def test_all_reduce_by_hand() -> None:
    line = roofline()
    assert line.all_reduce(1e6, 1) == 0.0
    # Ring over 8: each sends 14/8 of the bytes at 450 GB/s; 6.6 us and 14 hops of 0.6 us.
    assert line.all_reduce(1e6, 8) == pytest.approx(1.75e6 / 450e9 + 6.6e-6 + 14 * 0.6e-6)
    # Two hosts: once more over the network, 2 hops of 2.7 us.
    more = 1e6 / 25e9 + 2 * 2.7e-6
    assert line.all_reduce(1e6, 16) == pytest.approx(line.all_reduce(1e6, 8) + more)
    assert roofline(latency=False).all_reduce(1e6, 8) == pytest.approx(1.75e6 / 450e9)


def test_a_small_step_reads_the_weights_once() -> None:
    read = 2.0 * (QWEN.parameters - QWEN.embedding_parameters) + 8 * 1024 * 320 * 1024
    step = roofline(latency=False).decode_step(1, 1, 8, 1024)
    assert step == pytest.approx(read / 3.35e12)
    # Enough sequences make it a matter of arithmetic.
    many = roofline(latency=False).decode_step(1, 1, 4096, 1)
    assert many == pytest.approx(4096 * 2 * QWEN.parameters / 989.4e12, rel=1e-3)


def test_no_pass_is_faster_than_its_kernels_start() -> None:
    """A model whose weights a B200 reads in 34 us: each of its 30 layers starts eleven kernels."""
    tiny, device = MODELS["smollm2-135m"], DEVICES["b200"]
    line = Roofline(tiny, device, cluster("b200", 1, 8))
    starting = 30 * 11 * 3.4e-6
    assert line.decode_step(1, 1, 1, 16) == pytest.approx(starting)
    assert line.decode_step(1, 1, 1024, 2048) > starting
    load = Load(episodes=8, context=16, longest=16, generated=8)
    layout = StageDeployment("update", max_tokens_per_microbatch=64)
    scoring = line.training_seconds(layout, load, 1, 1, forward_only=True)
    assert scoring == pytest.approx(2 * starting)
    assert line.training_seconds(layout, load, 1, 0) > 6 * starting


loads = st.tuples(st.floats(1, 512), st.floats(16, 131072), st.sampled_from([1, 2, 4, 8]))


@examples(loads, st.floats(1e4, 1e7), st.floats(1, 10))
def test_a_larger_cache_is_never_slower(
    load: tuple[float, float, int], capacity: float, factor: float
) -> None:
    offered, context, tensor = load
    line = roofline()
    less = line.decode_rate(tensor, 1, offered, context, capacity)
    more = line.decode_rate(tensor, 1, offered, context, capacity * factor)
    assert more >= less * (1 - 1e-12)


def test_training_counts_the_work_and_what_is_sent() -> None:
    load = Load(episodes=64, context=4096, longest=4096, generated=2048)
    line = roofline()
    alone = StageDeployment("update", 8, 1, 1, 1, max_tokens_per_microbatch=4096)
    tokens = 8 * 4096
    attention = 2 * QWEN.layers * QWEN.query_size * 4096
    work = 3 * tokens * (2 * QWEN.parameters + attention) / 989.4e12
    scored = work / 3
    # Gradients are added up once a microbatch, those of the head once for 2,048 positions.
    chunks = tokens // 2 // 2048 - 8
    head = QWEN.vocabulary * QWEN.hidden_size
    work += 12 * (8 * QWEN.parameters + chunks * head) / 3.35e12
    assert line.training_seconds(alone, load, 1, 0) == pytest.approx(work, rel=1e-6)
    assert line.training_seconds(alone, load, 2, 0) == pytest.approx(2 * work, rel=1e-6)
    slower = {
        "selective": alone._replace(activation_checkpointing="selective"),
        "checkpointing": alone._replace(activation_checkpointing="full"),
        "tensor": alone._replace(tensor_parallel=8, replicas=1),
        "offload": alone._replace(offload_optimizer=True),
    }
    for layout in slower.values():
        assert line.training_seconds(layout, load, 1, 1) > work
    # Norms, activations and sums are computed again, matrix products are not.
    again = line.training_seconds(slower["selective"], load, 1, 0) - work
    moved = 2 * (7 * QWEN.hidden_size + 3 * QWEN.feed_forward)
    moved += 2 * 2 * (QWEN.query_size + QWEN.key_value_size)
    assert again == pytest.approx(tokens * QWEN.layers * moved / 3.35e12, rel=1e-6)
    full = line.training_seconds(slower["checkpointing"], load, 1, 0) - work
    assert again < 0.2 * full
    scoring = line.training_seconds(alone, load, 1, 1, forward_only=True)
    assert scoring == pytest.approx(scored, rel=1e-6)


def test_rings_share_a_hosts_network_by_their_number() -> None:
    """Of ranks with tensor parallelism 8 each has a ring of its own, and a host eight of them; all
    sixteen ranks of two hosts in one ring use the network for it alone."""
    line = roofline()
    assert line.group_bandwidth(8) == line.group_bandwidth(8, 4) == 450e9
    assert line.group_bandwidth(16, 1) == 25e9
    assert line.group_bandwidth(16, 2) == 12.5e9
    assert line.group_bandwidth(128, 8) == line.group_bandwidth(128, 64) == 25e9 / 8
    assert line.group_bandwidth(16) == 25e9 / 8


def test_context_ranks_gather_parameters_as_shard_ranks_do() -> None:
    """What the learner does (`parallelize`): context ranks save no gathering, they only add the
    exchange of keys and values."""
    line, load = roofline(), Load(episodes=16, context=1024, longest=1024, generated=512)
    shards = StageDeployment("update", 1, 8, 1, 16, max_tokens_per_microbatch=32768)
    mixed = shards._replace(context_parallel=8, shard=2)
    assert mixed.parts == shards.parts == 16
    assert line.training_seconds(mixed, load, 1, 1) > line.training_seconds(shards, load, 1, 1)
    assert line.republish_seconds(mixed, StageDeployment("rollout", 16, 8)) > 0.0


def test_weights_travel_as_they_compute_and_gradients_in_float32() -> None:
    """Two hosts whose network is what takes longest: the forward and the backward pass gather."""
    line, load = roofline(), Load(episodes=16, context=64, longest=64, generated=32)
    shards = StageDeployment("update", shard=16, max_tokens_per_microbatch=64)
    sent = QWEN.parameters * 15 / 16 / line.group_bandwidth(16, 1)

    def seconds(value: int, only: bool = False) -> float:
        return line.training_seconds(shards, load, 1, 0, only, value)

    assert seconds(4) - seconds(2) == pytest.approx((12 - 8) * sent)
    assert seconds(4, True) - seconds(2, True) == pytest.approx((4 - 2) * sent)


def test_tool_waits_and_prompts_lengthen_a_rollout() -> None:
    layout = StageDeployment("rollout", 16, 8, max_running_requests=64)
    line, load = roofline(), Load(1024, 8192, 8192, 4096, turns=4)
    quick = line.rollout_seconds(layout, load, 1000.0)
    assert quick > 64 * 4096 / 1000
    assert line.rollout_seconds(layout, load._replace(tool_wait=2.0), 1000.0) == quick + 8.0
    assert line.rollout_seconds(layout, load, 0.0) == math.inf


def test_weights_need_not_move_where_the_layout_is_the_same() -> None:
    rollout = StageDeployment("rollout", 16, 8)
    line = roofline()
    assert line.republish_seconds(StageDeployment("update", 16, 8), rollout) == 0.0
    assert line.republish_seconds(StageDeployment("update", 4, 8, shard=4), rollout) > 0.0
