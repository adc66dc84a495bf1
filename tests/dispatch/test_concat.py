"""Batches over the rows of several manifests, or of chosen rows of one, against plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earl_core.dispatch import Batch, ManifestError, ShardStore
from earl_core.dispatch.reads.plan import plan_rows
from earl_core.dispatch.reads.sources import Sources, join
from tests.dispatch.episodes import episode, manifest_of, write
from tests.dispatch.plan_cases import (
    HOSTS,
    REWARD,
    ROLLOUT,
    World,
    delivered,
    even_world,
    layouts,
    manifest,
    partitions,
    receive,
)


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[World, list[Sources], list[int], dict[int, int]]:
    """Parts of one to three iterations, in any order; their sample_ids one after another, as plain
    numbers; tokens by sample_id."""
    world, parts = World(), []
    ids = draw(st.lists(st.integers(0, 10**9), unique=True, max_size=18))
    iterations = draw(st.integers(1, 3))
    lengths = {
        axis: {row: draw(st.integers(0, most)) for row in ids}
        for axis, most in (("tokens", 40), ("turn_starts", 3), ("finish_reason", 5))
    }
    rewarded = draw(st.booleans())
    for iteration in range(iterations):
        own = ids[iteration::iterations]
        stages = [draw(partitions(world, "rollout", own, ROLLOUT, lengths))]
        if rewarded:
            stages.append(draw(partitions(world, "reward", own, REWARD, lengths)))
        chosen = draw(st.permutations(own))[: draw(st.integers(0, len(own)))]
        cut = draw(st.integers(0, len(chosen)))
        parts += [(part, join(stages, rows=part)) for part in (chosen[:cut], chosen[cut:])]
    order = draw(st.permutations(parts))
    rows = [row for part, _ in order for row in part]
    return world, [sources for _, sources in order], rows, lengths["tokens"]


@settings(deadline=None, max_examples=150)
@given(mixtures(), st.data())
def test_every_consumer_reads_exactly_the_rows_of_all_parts(case: Any, data: Any) -> None:
    world, parts, rows, tokens = case
    sources = Sources.concat(parts)
    assert sources.rows.tolist() == rows
    assert sources.tokens.tolist() == [tokens[row] for row in rows]
    files = [(entry.host, entry.file) for entry in sources.entries]
    assert len(set(files)) == len(files), "a shard is opened once"
    names = {name for part in parts for name in part.columns}
    assert set(sources.columns) == names
    for name, column in sources.columns.items():
        for at, row in enumerate(rows):
            start, size = column.start[at], column.length[at]
            found = world.files[files[column.shard[at]]][start : start + size]
            assert found.tobytes() == world.truth[name, row]

    layout = data.draw(layouts(names))
    groups = np.array(data.draw(st.lists(st.integers(0, 4), min_size=18, max_size=18)))
    plan = plan_rows(sources, layout, groups=groups[: len(rows)])
    buffers = {host: receive(world, plan, host) for host in set(plan.hosts)}
    seen: list[int] = []
    for rank in range(layout.ranks):
        own = plan.rows(rank).tolist()
        got = delivered(world, plan, rank, buffers[plan.hosts[rank]])
        assert got == {(name, row): world.truth[name, row] for name in names for row in own}
        if rank % layout.ranks_per_replica == 0:
            seen += own
    assert sorted(seen) == sorted(rows)
    nested = Sources.concat([Sources.concat(parts[:2]), *parts[2:]])
    assert plan_rows(nested, layout, groups=groups[: len(rows)]).owner.tolist() == (
        plan.owner.tolist()
    )


def test_a_batch_over_two_iterations_is_views_of_their_shards(tmp_path: Any) -> None:
    store = ShardStore(tmp_path / "store", 2**30)
    old = write(store, [episode(number, [(2, number + 1)]) for number in range(4)])
    new = write(store, [episode(number, [(1, number)], "länge") for number in range(4, 7)])
    some = join([old]).take(np.array([3, 1]))
    with Batch.of(Sources.concat([join([new]), some]), store, verify=True) as batch:
        assert batch.scalars("episode_id").tolist() == [4, 5, 6, 3, 1]
        assert [len(row) for row in batch.list_rows("tokens")] == [5, 6, 7, 6, 4]
        assert batch.strings("finish_reason") == ["länge"] * 3 + ["done"] * 2
        assert not batch.row("tokens", 0).flags.writeable
        assert not store.release(old.shards[0])
    assert store.release(old.shards[0])
    assert store.release(new.shards[0])


def test_parts_that_do_not_go_together_are_refused() -> None:
    _, (rollout,) = even_world(HOSTS[:2], 2, np.full((2, 2), 5))
    first, second = (manifest("rollout", [entry]) for entry in rollout.shards)
    with pytest.raises(ManifestError, match="a batch of several parts has a sample_id twice"):
        Sources.concat([join([first]), join([rollout])])
    with pytest.raises(
        ManifestError,
        match="column 'tokens' of part 2 of the batch is missing, and that of part 1 is a "
        "list of int32: choose columns that all parts have alike",
    ):
        Sources.concat([join([first], ["tokens"]), join([second], ["sample_id"]).only()])
    (entry,) = second.shards
    wide = entry.columns["tokens"].model_copy(update={"dtype": "float32"})
    other = entry.model_copy(update={"columns": {**entry.columns, "tokens": wide}})
    with pytest.raises(ManifestError, match="is a list of float32, and that of part 1"):
        Sources.concat([join([first]), join([manifest_of(other)])])
    with pytest.raises(ValueError, match="at least one part"):
        Sources.concat([])
