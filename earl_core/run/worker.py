"""The part that the ranks of all of a run's worker groups have in common.

By `PlanReads`, the one factory, they read each other's shards: here or from other hosts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from earl_core.cluster.rank_process import WorkerContext
from earl_core.cluster.rpc import Rule
from earl_core.config import RunConfig, parse_config
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.dispatch.reads.batch import Batch
from earl_core.dispatch.reads.plan import DispatchPlan
from earl_core.dispatch.shards.manifest import Manifest, await_manifest, sealed_path
from earl_core.dispatch.shards.store import ShardStore
from earl_core.run.branches import Branches
from earl_core.run.run_stores import run_store
from earl_core.secrets import files_of
from earl_core.system.errors import Cancelled
from earl_core.system.private_paths import note_private
from earl_core.system.processes import host_name
from earl_core.system.service import noted_directories

_SEEN_SECONDS = 60.0
"""Seconds for which NFS may take a directory for unchanged (`acdirmax`)."""

_CANCEL_SECONDS = 0.25

_KEYS = ("services", "*.key", "*/serve.key", "*/shards.token")

Result = TypeVar("Result")


class RunWorker:
    """Base of what a rank constructs and the controller calls. deployment: a dumped
    `StageDeployment`. config: a dumped `RunConfig`. peers: those of `Peers`. branches: the run's,
    dumped."""

    def __init__(
        self,
        context: WorkerContext,
        deployment: dict[str, Any],
        *,
        config: dict[str, Any],
        run_directory: str,
        peers: Sequence[Any] = (),
        branches: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._context = context
        self._deployment = StageDeployment(**deployment)
        self._config = parse_config(config)
        self._run_directory = Path(run_directory)
        self._peers = Peers(*peers)
        self._branches = Branches.load(branches)
        note_private(_private(self._config, config, run_directory))

    @property
    def _hosts(self) -> tuple[str, ...]:
        """The host of each rank, as manifests name it."""
        return self._context.hosts or (host_name(),) * self._context.world_size

    def _seed(self, iteration: int) -> int:
        """The seed of an iteration's draws."""
        return self._branches.seed(self._config.seed, iteration)

    def _manifests(self, references: Sequence[Mapping[str, Any]]) -> list[Manifest]:
        """The sealed manifests that have these `iteration`, `stage` and `digest`."""
        seconds = _SEEN_SECONDS if self._peers.addresses else 0.0
        paths = [
            sealed_path(self._run_directory, each["iteration"], each["stage"])
            for each in references
        ]
        return [
            await_manifest(path, each["digest"], seconds)
            for path, each in zip(paths, references, strict=True)
        ]

    async def _unless_cancelled(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of `work`, which is ended when the call is cancelled. Raises `Cancelled`."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                if self._context.cancelled.is_set():
                    stage = self._context.stage
                    raise Cancelled(f"the {stage} was cancelled; nothing of it is kept")
                await asyncio.wait({task}, timeout=_CANCEL_SECONDS)
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    def _reads(self) -> PlanReads:
        """Make the reads of the shards of this run, on whatever host they lie."""
        store = run_store(self._run_directory, self._config)
        return PlanReads(store, self._config.dispatch.verify == "always", self._peers)


def _private(config: RunConfig, dumped: Mapping[str, Any], run_directory: str) -> list[str]:
    """Paths that hold secrets of this run, and EARL's own in the user's other runs directories."""
    named = [config.runs_directory, run_directory, *files_of(dumped)]
    if config.rollout.gateway.keyfile:
        named.append(config.rollout.gateway.keyfile)
    for place in noted_directories():
        found = (each for form in _KEYS for each in place.glob(form))
        named += map(str, found)
    return named


if TYPE_CHECKING:
    from earl_core.dispatch.remote.tcp import TcpTransport


READ_RULES: dict[str, Rule] = {
    "read_seconds": "max",
    "imbalance": "max",
    "remote_bytes": "sum",
    "routing_bytes": "sum",
}
"""Rules that merge the ranks' `PlanReads.spent`, and the bytes of the routing that they read: a
stage waits for its slowest rank."""


class Peers(NamedTuple):
    """The range servers of a run's hosts, by host name; none: all shards lie on this host."""

    addresses: Mapping[str, tuple[str, int]] = {}
    token: str = ""

    def memories(self, hosts: Sequence[str]) -> list[str]:
        """A name of each host's shared memory; parts of one machine have one together."""
        return [str(self.addresses.get(host)) for host in hosts]


class PlanReads:
    """Opens a rank's share of a plan. verify: check the bytes of this host's shards, too."""

    def __init__(self, store: ShardStore, verify: bool = False, peers: Peers = Peers()) -> None:  # noqa: B008  (it cannot change)
        self.store = store
        self._verify = verify
        self._transport: TcpTransport | None = None
        self._seconds = self._imbalance = 0.0
        if peers.addresses:
            from earl_core.dispatch.remote.tcp import TcpTransport

            addresses = {host: (at[0], at[1]) for host, at in peers.addresses.items()}
            self._transport = TcpTransport(addresses, peers.token)

    def open(self, plan: DispatchPlan, rank: int) -> Batch:
        """The rows and columns that the plan gives to the rank. Raises what `Batch`, and for shards
        of other hosts `fetch`, raises."""
        started, self._imbalance = time.perf_counter(), plan.imbalance
        try:
            if self._transport is None:
                return Batch.of(plan.sources_of(rank), self.store, self._verify)
            from earl_core.dispatch.remote.fetch import fetch

            return fetch(plan, rank, self.store, self._transport, verify=self._verify)
        finally:
            self._seconds += time.perf_counter() - started

    def spent(self) -> dict[str, float]:
        """Metrics of the reads since this was last asked: their seconds, the last plan's imbalance,
        and the bytes that came from other hosts."""
        spent = {"read_seconds": self._seconds, "imbalance": self._imbalance}
        self._seconds = 0.0
        if self._transport is not None:
            spent["remote_bytes"] = self._transport.received_bytes
            self._transport.received_bytes = 0
        return spent
