"""What each rank reads: its own rows, once each over the replicas, balanced in each minibatch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from earl_core.deployment.shapes import ModelShape
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.learner.data.samples import (
    SCORED,
    TOKEN_VERSIONS,
    TRAINED,
    RankReader,
    RowCost,
    by_minibatch,
    groups_plan,
    training_samples,
)
from earl_core.learner.parallel.mesh import UpdateMesh
from earl_core.run.worker import PlanReads
from earl_core.selector.model.catalogue import MODELS
from earl_core.system.processes import host_name
from earl_core.trajectory.schema import ROUTING, ROUTING_HASH
from tests.learner.cuts import mesh_of
from tests.learner.recorded import Recorded

SPLIT = by_minibatch(2, seed=3, iteration=4)


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Recorded]:
    made = Recorded.make(tmp_path)
    yield made
    made.close()


def reader(recorded: Recorded, ranks: int) -> RankReader:
    return RankReader(PlanReads(recorded.store), (host_name(),) * ranks, RowCost(1.0, 0.01))


def mesh(deployment: StageDeployment, rank: int) -> UpdateMesh:
    """The rank's place; reading needs no connection."""
    return UpdateMesh(deployment, rank, torch.device("cpu"))


@pytest.mark.parametrize("shape", [(2, 1, 1, 1), (1, 3, 1, 1), (1, 2, 2, 1), (2, 2, 1, 2)])
@pytest.mark.parametrize("groups", [2, 9])
def test_replicas_share_the_rows_out_and_their_ranks_read_the_same(
    recorded: Recorded, shape: tuple[int, ...], groups: int
) -> None:
    """With 2 groups, of which one was dropped, some of the replicas have nothing to do."""
    deployment = mesh_of(*shape)
    given = recorded.manifests(4, groups)
    read: dict[int, list[list[int]]] = {}
    for rank in range(deployment.ranks):
        place = mesh(deployment, rank)
        with reader(recorded, deployment.ranks).open(given, place, TRAINED, SPLIT) as batch:
            # Of streams, and of mixtures.
            assert set(batch.names()) == set(TRAINED) - {TOKEN_VERSIONS, ROUTING, ROUTING_HASH}
            samples = training_samples(batch, [None] * len(batch))
            assert all(len(s.tokens) == len(s.advantages) > 0 for s in samples)
            assert all(s.episode_id == s.sample_id >> 16 for s in samples)
            rows = [s.sample_id for s in samples]
            del samples
            read.setdefault(place.data_rank, []).append(rows)
    for of_replica in read.values():
        assert all(rows == of_replica[0] for rows in of_replica)
    every = sorted(row for of_replica in read.values() for row in of_replica[0])
    assert every == sorted(row for shard in given[-1].shards for row in shard.row_ids)


def test_every_minibatch_is_balanced(recorded: Recorded) -> None:
    deployment = StageDeployment("update", replicas=2)
    given = recorded.manifests(4, 40)
    reading = reader(recorded, 2)
    plan = reading.plan(given, mesh(deployment, 0), TRAINED, SPLIT)
    with reading.reads.open(groups_plan(plan.sources, reading.hosts), 0) as batch:
        groups = batch.scalars("group_id")
    assert plan.imbalance <= plan.layout.max_imbalance
    cost = plan.layout.cost(plan.sources.tokens)
    parts = SPLIT(plan.sources.rows, groups)
    assert set(parts.tolist()) == {0, 1}
    for part in (0, 1):
        loads = np.bincount(plan.owner[parts == part], weights=cost[parts == part])
        assert max(loads) <= 1.07 * min(loads)
    for group in np.unique(groups):
        assert len(set(parts[groups == group].tolist())) == 1
        assert len(set(plan.owner[groups == group].tolist())) == 1


def test_groups_are_torn_where_they_would_leave_a_replica_idle(recorded: Recorded) -> None:
    given = recorded.manifests(4, 2)
    plan = reader(recorded, 2).plan(given, mesh(StageDeployment("update", shard=2), 0), SCORED)
    assert len(plan.rows(0)) == len(plan.rows(1)) == 1


def test_a_row_costs_what_its_multiplications_do() -> None:
    model = ModelShape(
        model_type="llama",
        hidden_size=64,
        layers=3,
        attention_heads=4,
        key_value_heads=2,
        vocabulary=100,
        max_positions=512,
        intermediate_size=128,
    )
    matrices = 3 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128 + 2 * 64) + 100 * 64
    # Each token's query with, on average, half of the keys, and as many values: 64 wide each.
    assert RowCost.of(model) == RowCost(matrices, 3 * 64)


def test_a_row_costs_attention_where_there_is_some_and_the_rule_of_a_state_elsewhere() -> None:
    hybrid = MODELS["qwen3.5-9b"]
    cost = RowCost.of(hybrid)
    assert cost.quadratic == 8 * 16 * 256
    # 24 layers with 32 states of [128, 128] each.
    rule = 4 * 24 * 32 * 128 * 128
    assert cost.linear == 32 * hybrid.layer_parameters + hybrid.embedding_parameters + rule
