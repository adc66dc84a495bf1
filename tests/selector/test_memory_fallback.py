"""How plans get by with ever less memory, and with what others hold of it."""

from __future__ import annotations

import pytest
from hypothesis import given as examples
from hypothesis import strategies as st

from earl_core.config.stages import StagesConfig
from earl_core.deployment.shapes import Hardware
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.selector.choice.policy import select
from earl_core.selector.choice.predict import Predictor
from earl_core.selector.choice.prediction import NoFeasiblePlan
from earl_core.selector.model.catalogue import MODELS
from earl_core.selector.model.memory_model import gib
from earl_core.selector.model.sizes import (
    coarse,
    coarse_above,
    logits_chunk,
    smaller_microbatches,
)
from tests.selector.examples import GIB, chosen, given, host


def test_microbatches_below_the_one_asked_for_end_at_the_longest_sample() -> None:
    assert smaller_microbatches(4096, 1000) == [2048, 1024]
    assert smaller_microbatches(4096, 700) == [2048, 1024, 768]
    assert smaller_microbatches(4096, 2100) == [3072]
    assert smaller_microbatches(4096, 3500) == smaller_microbatches(4096, 9000) == []


@examples(st.integers(1, 2**20), st.floats(1, 2**20))
def test_a_smaller_microbatch_holds_the_longest_sample(asked: int, longest: float) -> None:
    sizes = smaller_microbatches(asked, longest)
    assert all(longest <= size < asked for size in sizes)
    assert sizes == sorted(set(sizes), reverse=True)
    assert not sizes or sizes[-1] <= 1.5 * longest + 1
    assert coarse(longest) <= longest <= coarse_above(longest) <= 2 * longest


def fallback(context: float) -> tuple[list[StageDeployment], NoFeasiblePlan]:
    """What is chosen for the update with ever less memory, and the error in the end."""
    seen: list[StageDeployment] = []
    item = host(24.0, context, selector={"stages": ("update",)})
    for step in range(300):
        machine = Hardware(cpu_cores=4, memory_bytes=int(24 * GIB * 0.98**step))
        item = item.model_copy(update={"hardware": machine})
        try:
            found = chosen(item)
        except NoFeasiblePlan:
            break
        if not seen or seen[-1] != found:
            seen.append(found)
    with pytest.raises(NoFeasiblePlan) as error:
        select(item)
    return seen, error.value


def test_the_memory_fallback_on_a_cpu_begins_with_smaller_microbatches() -> None:
    seen, error = fallback(500.0)
    # The longest sample has 1,000 tokens.
    assert [item.max_tokens_per_microbatch for item in seen[:4]] == [4096, 2048, 1024, 1024]
    chunk = logits_chunk(MODELS["smollm2-135m"].vocabulary, gpu=False)
    means = [(item.logits_chunk_tokens, item.activation_checkpointing) for item in seen]
    assert list(dict.fromkeys(means)) == [
        (0, "none"),
        (chunk, "none"),
        (chunk, "selective"),
        (chunk, "full"),
    ]
    assert min(item.max_tokens_per_microbatch for item in seen) == 1024
    assert not any(item.offload_optimizer for item in seen)
    nearest = error.nearest
    assert nearest is not None
    assert nearest.peak > nearest.budget
    assert f"needs {gib(nearest.peak)}, but only" in str(error)
    assert f"only {gib(nearest.budget)} are available" in str(error)


def test_the_memory_fallback_of_long_samples_has_logits_in_chunks_before_checkpointing() -> None:
    seen, _ = fallback(2000.0)
    chunk = logits_chunk(MODELS["smollm2-135m"].vocabulary, gpu=False)
    # No smaller microbatch holds the longest sample.
    assert min(item.max_tokens_per_microbatch for item in seen) == 4096
    means = [(item.logits_chunk_tokens, item.activation_checkpointing) for item in seen]
    assert means[:2] == [(0, "none"), (chunk, "none")]
    assert all(item.activation_checkpointing != "none" for item in seen[2:])
    assert means[-1] == (chunk, "full")


def test_what_others_hold_is_not_there() -> None:
    free = host(8.0, selector={"stages": ("rollout", "update")})
    shared = free.model_copy(update={"reserved_bytes": {"update": 2.0 * GIB}})
    assert chosen(free).max_tokens_per_microbatch > chosen(shared).max_tokens_per_microbatch
    assert chosen(free, "rollout") == chosen(shared, "rollout")
    predictor = Predictor(shared)
    assert predictor.budget("update") == pytest.approx(0.9 * 8 * GIB - 2 * GIB)
    assert predictor.budget("rollout") == pytest.approx(0.9 * 8 * GIB)
    full = free.model_copy(update={"reserved_bytes": {"update": 6.5 * GIB}})
    with pytest.raises(
        NoFeasiblePlan, match=r"\d MiB are available.*\(6\.5 GiB are used by other processes"
    ):
        select(full)


def test_what_sleepers_keep_of_a_gpu_is_not_there() -> None:
    free = given(8192.0)
    # Until it was measured: libraries of the update and of the engine that sleeps.
    assert Predictor(free).budget("update") == pytest.approx(0.9 * 80 * GIB - 2 * GIB)
    apart = free.model_copy(update={"stages": StagesConfig(placement="separate")})
    assert Predictor(apart).budget("update") == pytest.approx(0.9 * 80 * GIB - 1 * GIB)
    measured = free.model_copy(update={"reserved_bytes": {"update": 30.0 * GIB}})
    assert Predictor(measured).budget("update") == pytest.approx(0.9 * 80 * GIB - 30 * GIB)
    full = free.model_copy(update={"reserved_bytes": {"update": 71.0 * GIB}})
    with pytest.raises(NoFeasiblePlan, match=r"on a device \(71\.0 GiB are libraries' and others'"):
        select(full)


def test_the_torch_engine_runs_fewer_sequences_when_its_cache_would_not_fit() -> None:
    """Its cache grows with the sequences in play and the longest of them."""

    def limit(context: float) -> int:
        return chosen(
            host(3.0, context, selector={"stages": ("rollout",)}), "rollout"
        ).max_running_requests

    limits = [limit(context) for context in (100.0, 1000.0, 2000.0, 4000.0)]
    assert limits[0] == 256
    assert limits == sorted(limits, reverse=True)
    assert 1 <= limits[-1] < 64
    too_little = host(0.9, 4000.0, selector={"stages": ("rollout",)})
    with pytest.raises(NoFeasiblePlan, match=r"only 829 MiB are available on this host of 922 MiB"):
        select(too_little)
