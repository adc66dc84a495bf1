"""Plans: executed on plain byte arrays, they bring every consumer exactly what it needs."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earl_core.dispatch.reads.plan import BOUNDS, DispatchPlan, Layout, make_plan, plan_rows
from earl_core.dispatch.reads.sources import join, sample_ids
from earl_core.dispatch.remote.incoming import incoming_of
from earl_core.dispatch.shards.manifest import ManifestError, ShardEntry
from tests.dispatch.plan_cases import HOSTS, cases, delivered, even_world, manifest, receive
from tools.traffic import Traffic


@settings(deadline=None, max_examples=150)
@given(cases())
def test_any_partition_and_layout_reassembles_exactly(case: Any) -> None:
    world, stages, layout, groups = case
    plan = make_plan(stages, layout, groups=groups)
    wanted = set(layout.columns or set().union(*(stage.column_names() for stage in stages)))
    assert set(plan.sources.columns) == wanted
    buffers = {host: receive(world, plan, host) for host in set(plan.hosts)}
    got = [delivered(world, plan, rank, buffers[plan.hosts[rank]]) for rank in range(layout.ranks)]
    replicas: list[list[int]] = []
    for first in range(0, layout.ranks, layout.ranks_per_replica):
        rows = plan.rows(first).tolist()
        replicas.append(rows)
        for place in got[first]:
            copies = {got[rank][place] for rank in range(first, first + layout.ranks_per_replica)}
            assert copies == {world.truth[place]}
    assert sorted(row for rows in replicas for row in rows) == sample_ids(stages[-1]).tolist()
    moved = sum(len(set(_bytes(plan, host))) for host in set(plan.hosts))
    traffic = Traffic(plan)
    assert traffic.moved_bytes == moved
    assert traffic.needed_bytes >= moved
    assert 0.0 <= traffic.local_share <= 1.0
    sent = Counter(one[0] for host in set(plan.hosts) for one in _bytes(plan, host))
    received = [len(_bytes(plan, host)) for host in set(plan.hosts)]
    assert plan.busiest_bytes == max([*sent.values(), *received])


def _bytes(plan: DispatchPlan, host: str) -> list[tuple[str, str, int]]:
    return [
        (source, file, byte)
        for source, file, start, length in crossing(plan, host)
        for byte in range(start, start + length)
    ]


def crossing(plan: DispatchPlan, host: str) -> list[tuple[str, str, int, int]]:
    """(host, file, start, length) of all that a host reads from others."""
    incoming = incoming_of(plan, host)
    spans = zip(
        incoming.shard.tolist(), incoming.start.tolist(), incoming.length.tolist(), strict=True
    )
    return [(plan.entries[n].host, plan.entries[n].file, start, size) for n, start, size in spans]


def dearest(cost: np.ndarray, replicas: int) -> float:
    """Plain longest processing time first, as a reference: the highest load."""
    loads = [0.0] * replicas
    for value in sorted(cost.tolist(), reverse=True):
        heapq.heapreplace(loads, loads[0] + value)
    return max(loads)


@settings(deadline=None, max_examples=100)
@given(cases())
def test_balance_keeps_the_bound_and_groups_stay_whole(case: Any) -> None:
    _, stages, layout, groups = case
    plan = make_plan(stages, layout, groups=groups)
    counts = {
        row: n for s in stages[0].shards for row, n in zip(s.row_ids, s.axes["tokens"], strict=True)
    }
    ids = sample_ids(stages[-1]).tolist()
    group_of = dict(zip(ids, groups.tolist(), strict=True))
    cost = np.array([layout.linear * counts[r] + layout.quadratic * counts[r] ** 2 for r in ids])
    cost = cost if cost.any() else np.ones(len(ids))
    per_row = dict(zip(ids, cost.tolist(), strict=True))
    step = layout.ranks_per_replica
    loads = [
        sum(per_row[row] for row in plan.rows(rank).tolist())
        for rank in range(0, layout.ranks, step)
    ]
    mean = sum(loads) / len(loads)
    items = cost
    if layout.keep_groups:
        items = np.bincount(groups, weights=cost) if len(groups) else cost
        homes: dict[int, set[int]] = {}
        for rank in range(0, layout.ranks, step):
            for row in plan.rows(rank).tolist():
                homes.setdefault(group_of[row], set()).add(rank)
        assert all(len(ranks) == 1 for ranks in homes.values())
    if mean:
        assert plan.imbalance == pytest.approx(max(loads) / mean - 1, abs=1e-9)
        allowed = max(mean * (1 + layout.max_imbalance), dearest(items, len(loads)))
        assert max(loads) <= allowed * (1 + 1e-9)


def test_every_part_of_the_work_is_balanced_by_itself() -> None:
    tokens = np.random.default_rng(5).integers(100, 900, size=(1, 60))
    _, stages = even_world(HOSTS[:1], 60, tokens)
    layout = Layout(data_parallel=3, keep_groups=True)
    groups, parts = np.arange(60) // 2, np.arange(60) // 2 % 4
    plan = plan_rows(join(stages, layout.columns), layout, groups=groups, parts=parts + 7)
    total = 0
    for part in range(4):
        loads = [tokens[0, rows[parts[rows] == part]].sum() for rows in map(plan.rows, range(3))]
        alone = np.bincount(groups[parts == part], weights=tokens[0, parts == part])
        assert max(loads) <= max(sum(loads) / 3 * 1.06, dearest(alone, 3)) * (1 + 1e-9)
        total += max(loads)
    assert plan.imbalance == pytest.approx(total / (tokens.sum() / 3) - 1)
    assert (plan.owner[0::2] == plan.owner[1::2]).all()


@settings(deadline=None, max_examples=60)
@given(cases(), st.randoms(use_true_random=False))
def test_the_order_of_producers_changes_nothing(case: Any, random: Any) -> None:
    _, stages, layout, groups = case
    shuffled = []
    for stage in stages:
        shards = list(stage.shards)
        random.shuffle(shards)
        shuffled.append(stage.model_copy(update={"shards": tuple(shards)}))
    one, other = (make_plan(some, layout, groups=groups) for some in (stages, shuffled))
    assert one.digest == other.digest == make_plan(stages, layout, groups=groups).digest
    for host in set(one.hosts):
        assert crossing(one, host) == crossing(other, host)
    assert [one.rows(rank).tolist() for rank in range(layout.ranks)] == [
        other.rows(rank).tolist() for rank in range(layout.ranks)
    ]


def test_rows_stay_where_they_were_made_within_the_bound() -> None:
    tokens = np.random.default_rng(3).integers(100, 900, size=(4, 64))
    _, stages = even_world(HOSTS, 64, tokens)
    layout = Layout(data_parallel=8, hosts=tuple(host for host in HOSTS for _ in range(2)))
    plan = make_plan(stages, layout)
    assert plan.imbalance <= 0.06
    assert Traffic(plan).local_share > 0.95
    strict = make_plan(stages, replace(layout, max_imbalance=0.001))
    assert strict.imbalance <= 0.001
    assert 0.8 < Traffic(strict).local_share <= Traffic(plan).local_share


@settings(deadline=None, max_examples=60)
@given(cases(), st.sampled_from([1.0, 1e3, 1e6]))
def test_a_plan_that_knows_its_link_takes_the_bound_that_costs_least(
    case: Any, link_bytes: float
) -> None:
    _, stages, layout, groups = case
    plan = make_plan(stages, replace(layout, link_bytes=link_bytes), groups=groups)
    if len(set(layout.hosts)) < 2:
        assert plan.owner.tolist() == make_plan(stages, layout, groups=groups).owner.tolist()
        return
    others = [
        make_plan(stages, replace(layout, max_imbalance=bound), groups=groups) for bound in BOUNDS
    ]
    costs = [other.imbalance + other.busiest_bytes / link_bytes for other in others]
    assert plan.imbalance + plan.busiest_bytes / link_bytes == pytest.approx(min(costs))


def test_a_fast_link_buys_balance_and_a_slow_one_keeps_rows_where_they_are() -> None:
    draw = np.random.default_rng(3)
    tokens = np.concatenate(
        [draw.integers(100, top, size=(1, 64)) for top in (1100, 900, 900, 700)]
    )
    _, stages = even_world(HOSTS, 64, tokens)
    layout = Layout(data_parallel=8, hosts=tuple(host for host in HOSTS for _ in range(2)))
    fast, slow = (make_plan(stages, replace(layout, link_bytes=size)) for size in (1e12, 1e5))
    assert fast.imbalance <= 0.001
    assert slow.busiest_bytes < make_plan(stages, layout).busiest_bytes < fast.busiest_bytes
    assert slow.imbalance > 0.06


def test_even_producers_move_nothing() -> None:
    _, stages = even_world(HOSTS, 8, np.full((4, 8), 100))
    plan = make_plan(stages, Layout(data_parallel=4, hosts=HOSTS))
    assert Traffic(plan).moved_bytes == 0
    assert Traffic(plan).local_share == 1.0
    assert plan.imbalance == 0.0
    assert all(crossing(plan, host) == [] for host in HOSTS)


def test_neighbouring_rows_of_a_column_come_in_one_range() -> None:
    _, stages = even_world(HOSTS[:1], 8, np.full((1, 8), 100))
    layout = Layout(ranks_per_replica=2, hosts=("elm", "elm"), columns=("tokens",))
    plan = make_plan(stages, layout)
    assert [(one[0], one[3]) for one in crossing(plan, "elm")] == [("alder", 8 * 100 * 4)]
    assert Traffic(plan).moved_bytes == Traffic(plan).needed_bytes == 8 * 100 * 4


def test_an_empty_batch_has_a_plan() -> None:
    _, stages = even_world(HOSTS[:1], 0, np.zeros((1, 0)))
    plan = make_plan([manifest("rollout", []), *stages], Layout(data_parallel=2))
    assert [len(plan.rows(rank)) for rank in range(2)] == [0, 0]
    assert Traffic(plan).moved_bytes == 0
    assert plan.imbalance == 0.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"columns": ("tokens", "nowhere")}, "nowhere"),
        ({"hosts": ()}, "name the host of every consumer rank"),
        ({"keep_groups": True}, "the group of each"),
    ],
)
def test_layouts_that_cannot_be_met_say_why(change: dict[str, Any], words: str) -> None:
    _, stages = even_world(HOSTS[:2], 2, np.full((2, 2), 5))
    layout = replace(Layout(data_parallel=2, hosts=HOSTS[:2]), **change)
    with pytest.raises(ValueError, match=words):
        make_plan(stages, layout)


@pytest.mark.parametrize(
    "change",
    [
        {"data_parallel": 0},
        {"ranks_per_replica": 0},
        {"max_imbalance": -1.0},
        {"hosts": ("a", "b")},
    ],
)
def test_numbers_that_make_no_layout_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="layout"):
        Layout(**change)


def _column(entry: ShardEntry, **change: Any) -> dict[str, Any]:
    columns = {**entry.columns, "tokens": entry.columns["tokens"].model_copy(update=change)}
    return {"columns": columns}


@pytest.mark.parametrize(
    ("words", "damage"),
    [
        ("twice", lambda entry: {"row_ids": (entry.row_ids[0],) * entry.rows}),
        ("64 bits", lambda entry: {"row_ids": (0, 2**70)}),
        ("different types", lambda entry: _column(entry, dtype="float32")),
        (
            "overlap",
            lambda entry: _column(entry, values=(entry.columns["turn_starts"].values[0], 40)),
        ),
    ],
)
def test_manifests_that_contradict_themselves_are_refused(words: str, damage: Any) -> None:
    _, stages = even_world(HOSTS[:2], 2, np.full((2, 2), 5))
    shards = list(stages[0].shards)
    shards[0] = shards[0].model_copy(update=damage(shards[0]))
    layout = Layout(data_parallel=2, hosts=("elm", "elm"))
    with pytest.raises(ManifestError, match=words):
        incoming_of(make_plan([manifest("rollout", shards)], layout), "elm")


def test_a_stage_that_lacks_rows_of_a_later_one_is_refused() -> None:
    _, stages = even_world(HOSTS[:2], 2, np.full((2, 2), 5))
    fewer = manifest("rollout", stages[0].shards[:1])
    with pytest.raises(ManifestError, match="lacks rows"):
        make_plan([fewer, *stages], Layout(hosts=("alder",)))
