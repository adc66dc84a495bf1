"""What the controller asks of the stores of several hosts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from earl_core.dispatch import PoolFull, ShardStore
from earl_core.dispatch.remote import TransportError
from earl_core.dispatch.remote.range_server import RangeServer
from earl_core.run.remote_stores import HostStores, StoreCommands
from tests.dispatch.hosts import TOKEN, as_host


class Pair(NamedTuple):
    stores: HostStores
    servers: dict[str, tuple[str, int]]
    kept: list[ShardStore]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """This host, and one that answers as a daemon does."""
    kept = [ShardStore(tmp_path / name, 2**26) for name in ("oak", "elm")]
    for store in kept:
        store.prepare()
    stores, there = HostStores(kept[0]), StoreCommands(kept[1])

    def ask(method: str, *arguments: Any) -> Any:
        with as_host("elm"):
            return getattr(there, method)(*arguments)

    stores.join("elm", ask, [])
    with ExitStack() as held:
        held.enter_context(as_host("oak"))
        servers = [held.enter_context(RangeServer(store.directory, TOKEN)) for store in kept]
        yield Pair(stores, {"oak": servers[0].address, "elm": servers[1].address}, kept)
    for store in kept:
        store.remove()


def shards(pair: Pair) -> list[str]:
    return [path.name for store in pair.kept for path in store.directory.glob("*.arrow")]


def test_the_network_is_measured_and_nothing_stays(pair: Pair) -> None:
    assert 1e6 < pair.stores.fetch_bandwidth(pair.servers, TOKEN) < 1e12
    assert shards(pair) == []


def test_one_host_has_no_network(tmp_path: Path) -> None:
    store = ShardStore(tmp_path / "oak", 2**26)
    assert HostStores(store).fetch_bandwidth({}, TOKEN) == 0.0


def test_hosts_that_do_not_reach_each_other_are_found(pair: Pair) -> None:
    nobody = {**pair.servers, "elm": ("127.0.0.1", 9)}
    with pytest.raises(TransportError, match="elm"):
        pair.stores.fetch_bandwidth(nobody, TOKEN)
    assert shards(pair) == []


def test_no_room_for_a_measurement_leaves_nothing(pair: Pair) -> None:
    pair.kept[1].pool.max_bytes = 2**20
    with pytest.raises(PoolFull):
        pair.stores.fetch_bandwidth(pair.servers, TOKEN)
    assert shards(pair) == []
