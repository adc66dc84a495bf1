"""The run's shards on all of its hosts: each serves its own to the others."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import ExitStack

from earl_core.cluster.host import Host
from earl_core.config import ConfigError
from earl_core.dispatch import PoolFull
from earl_core.dispatch.remote.range_server import RangeServer
from earl_core.dispatch.remote.transport import TransportError
from earl_core.run import RunDirectory
from earl_core.run.worker import Peers
from earl_core.system.processes import host_name

HOST_STORE = "earl_core.run.remote_stores:HostStore"
"""Holds a run's shards on another host."""


def served(run: RunDirectory, hosts: Sequence[Host], held: ExitStack) -> Peers:
    """Open the run's store on every host and start their range servers, unless there is but this
    one. held: what ends with the run."""
    if len(hosts) == 1 and hosts[0].name == host_name():
        return Peers()
    token, own = secrets.token_hex(32), run.store.directory
    addresses: dict[str, tuple[str, int]] = {}
    server: RangeServer | None = None
    for host in hosts:
        settings = run.config.model_dump(mode="json")
        ask = host.keep(HOST_STORE, str(run.path), settings, host.address, token)
        if ask is not None:
            run.stores.join(host.name, ask, run.unreleased_shards())
            address, port = ask("served_at")
            addresses[host.name] = address, port
            continue
        if server is None:
            server = held.enter_context(RangeServer(own, token, host.address))
        addresses[host.name] = server.address
    return Peers(addresses, token)


def fetch_bandwidth(run: RunDirectory, peers: Peers) -> float:
    """Measure it; 0: there are no other hosts, or no room. Raises `ConfigError` for hosts that do
    not reach each other."""
    try:
        return run.stores.fetch_bandwidth(peers.addresses, peers.token)
    except TransportError as error:
        raise ConfigError(
            f"the hosts of the run do not read from each other: {error}",
            remedy="let all ports be reached between them",
        ) from error
    except PoolFull:
        # What needs the room will say so.
        return 0.0
