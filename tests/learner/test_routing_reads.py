"""Of the routing, which is most of a token's bytes, a context rank reads its own tokens' rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file

from earl_core.dispatch import Batch, ShardStore
from earl_core.dispatch.shards.manifest import Manifest
from earl_core.learner.attention.context_parallel import ContextGroup
from earl_core.learner.data.packing import TrainingSample, pack, plan_rows
from earl_core.learner.data.samples import recorded_routing
from earl_core.trajectory.routing import HASH_BYTES, RecordedRouting, RoutingShape
from earl_core.trajectory.samples import Episode, Sample, VersionSpan, rollout_rows
from earl_core.trajectory.schema import ROLLOUT_SCHEMA, ROUTING, ROUTING_HASH, with_routing
from tests.learner.launched import launch
from tests.learner.test_router_balance import gradients, learner_of, routed_samples
from tests.learner.test_routing import mixture, rows_of

LARGE = RoutingShape(layers=48, chosen=8, experts=128)
"""That of Qwen3-30B-A3B."""


def drawn(seed: int, tokens: int) -> np.ndarray:
    rows = np.random.default_rng(seed).integers(0, LARGE.experts, (tokens, LARGE.width))
    return rows.astype(LARGE.dtype)


def large_samples() -> list[TrainingSample]:
    """Groups of four that begin with the same 200 tokens, one of which was routed otherwise there,
    from its hundredth token on."""
    samples = []
    for number in range(12):
        group, draw = number // 4, np.random.default_rng(number)
        beginning = np.random.default_rng(100 + group).integers(0, 90, 200)
        tokens = np.concatenate([beginning, draw.integers(0, 90, draw.integers(50, 700))])
        rows = np.concatenate([drawn(group, 200), drawn(50 + number, len(tokens) - 200)])
        if number % 4 == 3:
            rows[100] = rows[101]
        routing = RecordedRouting(LARGE, rows, len(tokens), f"sample {number}", LARGE.hashes(rows))
        mask = np.arange(len(tokens)) >= 200
        samples.append(
            TrainingSample(
                tokens.astype(np.int32), mask.astype(np.uint8), np.zeros(len(tokens), np.float32),
                routing=routing, episode_id=number, group_id=group, sample_id=number,
            )
        )  # fmt: skip
    return samples


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_read_their_tokens_and_together_those_of_all(size: int) -> None:
    """Nothing of it to plan, and a token that samples share once."""
    computed, read, others = 0, [], large_samples()
    for rank in range(size):
        samples = large_samples()
        place = ContextGroup(rank, size, None)
        plan = plan_rows(samples, range(len(samples)), 3000, False)
        assert not any(each.routing.read_bytes for each in samples)
        for rows in plan:
            own = pack(samples, rows, routed=place.places)
            whole = pack(others, rows)
            assert np.array_equal(own.routing, whole.routing[place.places(own.tokens.size)])
            for index, row in enumerate(rows):
                assert np.array_equal(
                    whole.routing[whole.tree.positions(index)], rows_of(others[row])
                )
            computed += whole.tokens.size if rank == 0 else 0
        read.append(sum(each.routing.read_bytes for each in samples))
    tokens = sum(len(each.tokens) for each in others)
    # Each group shares 200 tokens, one of its samples half of them; microbatches cut it once.
    assert computed == tokens - 3 * (2 * 200 + 100) + 100
    needed = computed * LARGE.token_bytes
    assert sum(read) == needed
    assert max(read) <= 1.01 * needed / size
    # With the hashes of all tokens, which every rank reads.
    assert max(read) + HASH_BYTES * tokens <= (1 + 0.03 * size) * needed / size


def test_context_ranks_train_as_one_process_on_their_part_alone(tmp_path: Path) -> None:
    """Two replicas of two and one of four; all else of the routing is damaged."""
    directory = mixture(tmp_path / "model")
    alone = gradients(learner_of(directory, 0.0), routed_samples(directory))
    assert max(float(each.abs().max()) for each in alone.values()) > 1e-2
    save_file(alone, tmp_path / "alone.safetensors")
    for found in launch("tests.learner.routing_ranks", "compare", 4, tmp_path):
        assert {name: value for name, value in found.items() if "read" in name} == {
            "two read": 1.0, "four read": 1.0
        }  # fmt: skip
        assert max(found["two gap"], found["four gap"]) < 1e-5, found


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ShardStore]:
    made = ShardStore(tmp_path / "shm" / "run", 2**26)
    yield made
    made.remove()


def test_shards_without_hashes_are_hashed_by_their_reader(store: ShardStore) -> None:
    """Those of an older release: all of the routing is read, as it was."""
    sample = Sample()
    sample.begin_turn([1, 2, 3])
    rows = drawn(0, 4)
    sample.answer([4, 5], [-1.0, -1.0], [VersionSpan(0, 0, 2)], routing=rows)
    entry = store.publish(
        stage="rollout", iteration=0, rank=0, schema=with_routing(ROLLOUT_SCHEMA, LARGE),
        rows=rollout_rows([Episode(0, 0, 0, [sample], "done")], ROLLOUT_SCHEMA, LARGE),
    )  # fmt: skip
    sealed = Manifest(
        run="r", iteration=0, stage="rollout", key="k", policy_version=0, shards=(entry,)
    )
    found = []
    for columns in ([ROUTING, ROUTING_HASH, "tokens"], [ROUTING, "tokens"]):
        with Batch(store, [sealed], columns=columns) as batch:
            (routing,) = recorded_routing(batch, LARGE)
            assert routing is not None
            found.append((routing.hashes.tolist(), routing.read_bytes))
            del routing
    assert found[0][0] == found[1][0]
    assert found[0][0][:4] == LARGE.hashes(rows).tolist()
    assert len(set(found[0][0])) == 5
    assert [read for _, read in found] == [0, 5 * LARGE.token_bytes]
