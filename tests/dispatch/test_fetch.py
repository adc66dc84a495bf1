"""Fetching over several hosts gives what a local read gives, each byte over the wire once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earl_core.dispatch import Batch, Manifest, ShardStore
from earl_core.dispatch.reads.plan import DispatchPlan, Layout, make_plan, plan_rows
from earl_core.dispatch.reads.sources import Sources, join
from earl_core.dispatch.remote import (
    Proof,
    RemoteRead,
    TransportError,
)
from earl_core.dispatch.remote.fetch import cut_parts, fetch
from earl_core.dispatch.remote.incoming import Incoming
from tests.dispatch.hosts import (
    SCHEMA,
    Counting,
    Hosts,
    as_host,
    make_shard,
    manifest,
    several_hosts,
)
from tests.dispatch.segments import free_bytes
from tools.traffic import Traffic

NAMES = ["a", "b", "c"]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with several_hosts(tmp_path, NAMES) as made:
        yield made


@pytest.fixture(scope="module")
def shared_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with several_hosts(tmp_path_factory.mktemp("hosts"), NAMES) as made:
        yield made


def produce(hosts: Hosts, shards: Sequence[tuple[str, Sequence[int]]]) -> Manifest:
    """Shards of these hosts with rows of these token counts."""
    entries, first = [], 0
    for host, lengths in shards:
        entries.append(make_shard(hosts.stores[host], lengths, first, host))
        first += len(lengths)
    return manifest(entries)


def release(hosts: Hosts, made: Manifest) -> None:
    deadline = time.monotonic() + 60
    for entry in made.shards:
        while not hosts.stores[entry.host].release(entry) and time.monotonic() < deadline:
            time.sleep(0.005)


def copied(batch: Batch) -> dict[int, dict[str, object]]:
    """Everything in a batch, by row."""
    found: dict[int, dict[str, object]] = {int(row): {} for row in batch.rows}
    for name in batch.names():
        kind = SCHEMA.field(name).type
        values: Sequence[object] = (
            batch.strings(name)
            if pa.types.is_large_string(kind)
            else [view.tolist() for view in batch.list_rows(name)]
            if pa.types.is_large_list(kind)
            else batch.scalars(name).tolist()
        )
        for row, value in zip(batch.rows.tolist(), values, strict=True):
            found[row][name] = value
    return found


def local(hosts: Hosts, made: Manifest) -> dict[int, dict[str, object]]:
    """What every shard holds, read where it lies."""
    found: dict[int, dict[str, object]] = {}
    for entry in made.shards:
        with Batch(hosts.stores[entry.host], [manifest([entry])]) as batch:
            found |= copied(batch)
    return found


def files_left(hosts: Hosts) -> list[str]:
    """What fetching left behind, other than free segments and the two lock files."""
    return [
        path.name
        for store in hosts.stores.values()
        for path in store.directory.iterdir()
        if "fetch-" in path.name or path.name.startswith(".writing")
    ]


lengths = st.lists(st.integers(0, 40), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(
    shards=st.lists(st.tuples(st.sampled_from(NAMES), lengths), min_size=1, max_size=5),
    data_parallel=st.integers(1, 3),
    each=st.integers(1, 4),
    columns=st.sampled_from([None, ("tokens",), ("reward", "finish_reason", "loss_mask")]),
    part_bytes=st.sampled_from([1, 200, 2**20]),
    data=st.data(),
)
def test_any_layout_over_hosts_equals_a_local_read(
    shared_hosts: Hosts,
    shards: list[tuple[str, list[int]]],
    data_parallel: int,
    each: int,
    columns: tuple[str, ...] | None,
    part_bytes: int,
    data: st.DataObject,
) -> None:
    made = produce(shared_hosts, shards)
    ranks = data_parallel * each
    places = tuple(data.draw(st.lists(st.sampled_from(NAMES), min_size=ranks, max_size=ranks)))
    layout = Layout(data_parallel, each, places, columns)
    plan = make_plan([made], layout)
    expected = local(shared_hosts, made)
    transport = shared_hosts.transport()
    batches = []
    for rank in data.draw(st.permutations(range(ranks))):
        with as_host(places[rank]):
            store = shared_hosts.stores[places[rank]]
            batches.append((rank, fetch(plan, rank, store, transport, part_bytes=part_bytes)))
    for rank, batch in batches:
        assert batch.rows.tolist() == plan.rows(rank).tolist()
        for row, found in copied(batch).items():
            wanted = {n: v for n, v in expected[row].items() if columns is None or n in columns}
            assert found == wanted
    assert transport.received == Traffic(plan).moved_bytes, "each byte once per host"
    for _, batch in batches:
        batch.close()
    transport.close()
    assert files_left(shared_hosts) == []
    release(shared_hosts, made)


def test_rows_of_two_iterations_come_over_the_wire_once(hosts: Hosts) -> None:
    one = produce(hosts, [("a", [40, 3, 0]), ("b", [7])])
    other = manifest([make_shard(hosts.stores["c"], [5, 90, 11], 100, "c")])
    parts = [join([other]), join([one], rows=[3, 1]), join([one], rows=[0])]
    plan = plan_rows(Sources.concat(parts), Layout(1, 3, ("b", "b", "c")))
    expected = local(hosts, one) | local(hosts, other)
    transport = hosts.transport()
    for rank, name in enumerate(plan.hosts):
        with as_host(name):
            batch = fetch(plan, rank, hosts.stores[name], transport, part_bytes=200)
        found = copied(batch)
        assert list(found) == [100, 101, 102, 3, 1, 0]
        assert found == {row: expected[row] for row in found}
        batch.close()
    assert transport.received == Traffic(plan).moved_bytes
    assert files_left(hosts) == []


def shared_plan(made: Manifest, ranks: int = 4) -> DispatchPlan:
    """All rows of host a go to the ranks of one replica on host b."""
    return make_plan([made], Layout(1, ranks, ("b",) * ranks))


def test_ranks_of_a_host_share_one_segment_whenever_they_come(hosts: Hosts) -> None:
    made = produce(hosts, [("a", [1000, 30, 0, 7])])
    plan = shared_plan(made)
    transport = hosts.transport()
    store = hosts.stores["b"]
    with as_host("b"):
        first = fetch(plan, 0, store, transport)
        second = fetch(plan, 1, store, transport)
        first.close()
        second.close()
        # Two ranks have not come yet, so it stays.
        assert any(name.endswith(".part") for name in files_left(hosts))
        third = fetch(plan, 2, store, transport)
        fourth = fetch(plan, 3, store, transport)
        third.close()
        assert transport.received == Traffic(plan).moved_bytes
        fourth.close()
        assert files_left(hosts) == []
        # Again, as a second epoch does.
        for rank in range(4):
            fetch(plan, rank, store, transport).close()
    assert transport.received == 2 * Traffic(plan).moved_bytes
    assert files_left(hosts) == []
    assert free_bytes(store.pool) == sum(
        path.stat().st_size for path in store.directory.glob(".free.*")
    )


def test_concurrent_ranks_share_the_work(hosts: Hosts) -> None:
    made = produce(hosts, [("a", [50_000] * 6), ("c", [50_000] * 6)])
    plan = shared_plan(made)
    transport = hosts.transport()
    store = hosts.stores["b"]
    expected = local(hosts, made)
    with as_host("b"), ThreadPoolExecutor(4) as threads:
        batches = list(
            threads.map(lambda r: fetch(plan, r, store, transport, part_bytes=300_000), range(4))
        )
    assert transport.received == Traffic(plan).moved_bytes
    for batch in batches:
        assert copied(batch) == expected
        batch.close()
    assert files_left(hosts) == []


class _Slow(Counting):
    """Says that it began, and never finishes."""

    def read_all(self, reads: dict[str, RemoteRead], proofs: dict[str, Proof]) -> None:
        (Path(os.environ["EARL_TEST_BEGAN"])).touch()
        time.sleep(120)


def _fetch_slowly(plan: DispatchPlan, store: ShardStore, transport: _Slow) -> None:
    os.environ["EARL_HOST"] = "b"
    fetch(plan, 0, store, transport)


def _began(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_another_rank_takes_over_from_one_that_was_killed(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = produce(hosts, [("a", [1000, 30])])
    plan = shared_plan(made, 2)
    store = hosts.stores["b"]
    began = tmp_path / "began"
    monkeypatch.setenv("EARL_TEST_BEGAN", str(began))
    slow = _Slow(hosts.addresses, None)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_fetch_slowly, args=(plan, store, slow))
    child.start()
    _began(began)
    transport = hosts.transport()
    results: list[Batch] = []

    def other() -> None:
        results.append(fetch(plan, 1, store, transport))

    with as_host("b"):
        waiting = threading.Thread(target=other)
        waiting.start()
        time.sleep(0.2)
        assert transport.received == 0
        assert not results
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        waiting.join(30)
    assert copied(results[0]) == local(hosts, made)
    results[0].close()
    assert store.pool.sweep_unsealed() == 1, "what the killed rank was writing"
    # The killed rank never closes; adopting the run releases what it shared.
    assert store.adopt(set()) == 1
    assert [n for n in files_left(hosts) if not n.endswith(".done")] == []


def test_waiting_for_a_rank_that_hangs_has_an_end(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = shared_plan(produce(hosts, [("a", [10])]), 2)
    began = tmp_path / "began"
    monkeypatch.setenv("EARL_TEST_BEGAN", str(began))
    slow = _Slow(hosts.addresses, None)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_fetch_slowly, args=(plan, hosts.stores["b"], slow))
    child.start()
    try:
        _began(began)
        with as_host("b"), pytest.raises(TransportError, match="another rank"):
            fetch(plan, 1, hosts.stores["b"], hosts.transport(), wait_seconds=0.2)
    finally:
        child.kill()
        child.join()


def _damage(hosts: Hosts, made: Manifest) -> None:
    entry = made.shards[0]
    path = hosts.stores[entry.host].path(entry)
    with open(path, "r+b") as file:
        place = entry.columns["tokens"].values[0]
        file.seek(place)
        old = file.read(1)
        file.seek(place)
        file.write(bytes([old[0] ^ 0x10]))


def _release_first(hosts: Hosts, made: Manifest) -> None:
    assert hosts.stores["a"].release(made.shards[0])


def _stop_server(hosts: Hosts, made: Manifest) -> None:
    hosts.servers["a"].close()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_damage, "the memory of host .* is damaged"),
        (_release_first, "is not on host"),
        (_stop_server, "cannot be reached|broke off"),
    ],
)
def test_a_failed_fetch_leaves_nothing_and_can_be_repeated(
    hosts: Hosts, spoil: Callable[[Hosts, Manifest], None], words: str
) -> None:
    made = produce(hosts, [("a", [1000, 30]), ("b", [5])])
    plan = shared_plan(made, 1)
    store = hosts.stores["b"]
    spoil(hosts, made)
    with as_host("b"):
        for _ in range(2):
            with pytest.raises(TransportError, match=words):
                fetch(plan, 0, store, hosts.transport())
            assert files_left(hosts) == []
    release(hosts, manifest([made.shards[1]]))
    assert store.pool.used_bytes() == free_bytes(store.pool)


def test_a_live_view_keeps_the_part(hosts: Hosts) -> None:
    plan = shared_plan(produce(hosts, [("a", [1000])]), 1)
    with as_host("b"):
        batch = fetch(plan, 0, hosts.stores["b"], hosts.transport())
    view = batch.row("tokens", 0)
    with pytest.raises(BufferError):
        batch.close()
    assert any(name.endswith(".part") for name in files_left(hosts))
    assert len(view) == 1000
    del view
    batch.close()
    assert files_left(hosts) == []


def test_the_wrong_host_is_told_so(hosts: Hosts) -> None:
    plan = shared_plan(produce(hosts, [("a", [3])]), 1)
    with as_host("c"), pytest.raises(ValueError, match="EARL_HOST"):
        fetch(plan, 0, hosts.stores["c"], hosts.transport())


def test_local_rows_need_no_transport(hosts: Hosts) -> None:
    made = produce(hosts, [("a", [3, 9])])
    plan = make_plan([made], Layout())
    with as_host("a"):
        batch = fetch(plan, 0, hosts.stores["a"], Counting({}, None), verify=True)
    expected = local(hosts, made)
    assert copied(batch) == expected
    assert not batch.row("tokens", 0).flags.writeable
    batch.close()
    assert not (hosts.stores["a"].directory / ".fetch.lock").exists()


def test_parts_cover_everything_once() -> None:
    draw = np.random.default_rng(3)
    length = draw.integers(1, 500, 200)
    start = np.cumsum(length + draw.integers(1, 9, 200))
    incoming = Incoming(np.zeros(200, np.int64), start, length)
    for most in (1, 64, 1000, 10**6):
        found = cut_parts(incoming, most)
        assert [part.first for part in found[1:]] == [part.last for part in found[:-1]]
        assert (found[0].first, found[-1].last) == (0, 200)
        for part in found:
            place = incoming.place[part.first : part.last] - part.base
            assert place[0] >= 0
            assert place[-1] + length[part.last - 1] == part.size
            assert part.size <= most or part.last - part.first == 1
            assert ((place - start[part.first : part.last]) % 8 == 0).all()
