"""What moves between the stages of an iteration, in bytes, and by which way.

Nothing is estimated here: rows are planned by the functions by which the ranks plan their reads,
over manifests of stages that have run, or over such as they would seal under a load
(`expected_manifests`). A column that a consumer's host holds is mapped where it lies; of other
hosts it is received, once for all ranks of a host.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from earl_core.config import RunConfig
from earl_core.control.dealing import contiguous
from earl_core.control.stage_places import Site
from earl_core.deployment.stages import ROWS, STAGES, Stage, taking_part
from earl_core.dispatch.reads.plan import DispatchPlan, Layout, plan_rows
from earl_core.dispatch.reads.sources import join, sample_ids
from earl_core.dispatch.shards.manifest import Manifest
from earl_core.dispatch.shards.shard import described
from earl_core.experience.alike_groups import left_out_rows
from earl_core.experience.experience_worker import episodes_plan, keeps_groups
from earl_core.learner.data.samples import (
    LABEL,
    SCORED,
    TRAINED,
    RowCost,
    Split,
    by_minibatch,
    groups_plan,
    sources_of,
    training_plan,
)
from earl_core.learner.data.zero_advantage import ADVANTAGES
from earl_core.selector.model.roofline import Load
from earl_core.trajectory.schema import (
    ADVANTAGE_SCHEMA,
    GROUP_SCHEMA,
    REFERENCE_SCHEMA,
    REWARD_SCHEMA,
    ROLLOUT_SCHEMA,
    SAMPLE_BITS,
)

_WRITTEN = {
    "reference": REFERENCE_SCHEMA,
    "reward": REWARD_SCHEMA,
    "advantage": ADVANTAGE_SCHEMA,
}
"""Columns that the stages after the rollout write for its rows."""


class Move(NamedTuple):
    """Columns of one stage that another one reads, or the weights. here: bytes that are mapped
    where they lie. received: bytes that come from other hosts. reads: plans by which that is done
    in an iteration; the bytes are of all together."""

    to: str
    of: str
    columns: tuple[str, ...]
    here: int
    received: int
    reads: int = 1

    @property
    def ways(self) -> list[str]:
        """The ways that these bytes take."""
        remote = "collectives of the update's ranks" if self.of == "publish" else "TCP range server"
        return [*(["shared memory"] if self.here else []), *([remote] if self.received else [])]


@dataclass(frozen=True)
class Reader:
    """Plans the reads of a site's stages. cost: of a row, where they compute with the model."""

    config: RunConfig
    site: Site
    cost: RowCost

    def plans(self, stage: str, manifests: Mapping[str, Manifest]) -> list[DispatchPlan]:
        """Every plan by which the stage's ranks read, in order; the last is that of its rows.
        manifests: of the stages that it reads. Samples that add nothing to the update are known to
        nobody before, and are planned like the others."""
        given = [manifests[name] for name in STAGES[stage].reads if name in manifests]
        hosts = self.site.hosts_of(stage)
        if STAGES[stage].role == "experience":
            found = self._of_episodes(given, hosts)
            # The statistics of all ranks come before any advantage.
            return found * (2 if stage == "advantage" else 1)
        out = left_out_rows(given[0])
        label = () if self.config.one_penalty else (LABEL,)
        plan = partial(self._of_training, stage, given, hosts, out)
        if stage != "update":
            return list(plan((*SCORED, *label)))
        iteration = self.site.plan.iteration
        imitates = self.config.imitates(iteration)
        looks = list(plan(ADVANTAGES)) if self._skips and not imitates else []
        count, seed = self.config.minibatches(iteration), self.config.seed
        split = by_minibatch(count, seed=seed, iteration=iteration)
        return looks + list(plan((*TRAINED, *label), split))

    @property
    def _skips(self) -> bool:
        return self.config.skips_zero_advantage

    def _groups(self, rows: np.ndarray) -> np.ndarray:
        return (rows >> SAMPLE_BITS) // self.config.rollout.group_size

    def _of_episodes(self, given: Sequence[Manifest], hosts: tuple[str, ...]) -> list[DispatchPlan]:
        rows = np.setdiff1d(sample_ids(given[0]), left_out_rows(given[0]))
        units, found = rows >> SAMPLE_BITS, []
        if len(hosts) > 1 and keeps_groups(self.config):
            everyone = Layout(ranks_per_replica=len(hosts), hosts=hosts)
            found.append(plan_rows(join(given[:1], ("group_id",), rows), everyone))
            units = self._groups(rows)
        return [*found, episodes_plan(given, rows, units, hosts)]

    def _of_training(
        self,
        stage: str,
        given: Sequence[Manifest],
        hosts: tuple[str, ...],
        out: np.ndarray,
        columns: Sequence[str],
        split: Split | None = None,
    ) -> Iterator[DispatchPlan]:
        deployment = self.site.deployment(stage)
        sources, groups = sources_of(given, columns, out), None
        if deployment.data_parallel > 1:
            yield groups_plan(sources, hosts)
            groups = self._groups(sources.rows)
        link = self.site.plan.link_bytes(stage)
        yield training_plan(sources, deployment, hosts, self.cost, groups, split, link)

    def weights(self, version: int) -> Move:
        """The way of a published version of so many bytes to the engines: the ranks of the update
        write it into the shared memory of their host, where engines map it; what the ranks of a
        host lack they get from others."""
        ranks, mesh = self.site.hosts_of("publish"), self.site.deployment("publish")
        each, received = mesh.ranks // mesh.replicas, 0
        for host in dict.fromkeys(ranks):
            held = {rank % each for rank, name in enumerate(ranks) if name == host}
            received += version * (each - len(held)) // each
        engines = len(set(self.site.hosts_of("rollout")))
        return Move("next rollout", "publish", ("weights",), version * engines, received)

    def moves(
        self, manifests: Mapping[str, Manifest], finished: Container[str] | None = None
    ) -> list[Move]:
        """What the stages read of these manifests, stage by stage, source by source. finished: the
        stages that have; None: all."""
        found = []
        for stage in reading(self.config, self.site.plan.iteration):
            if finished is not None and stage.name not in finished:
                continue
            names = [name for name in stage.reads if name in manifests]
            found += _moves(stage.name, names, self.plans(stage.name, manifests))
        return found


def reading(config: RunConfig, iteration: int) -> list[Stage]:
    """The stages of such an iteration that read columns of others."""
    stages = taking_part(config, config.imitates(iteration))
    return [stage for stage in stages if stage.makes in ("columns", "state") and _reads(stage)]


def _reads(stage: Stage) -> bool:
    return any(name in ROWS for name in stage.reads)


def _moves(to: str, names: Sequence[str], plans: Sequence[DispatchPlan]) -> list[Move]:
    """Add up the plans' bytes by the stage that wrote them. names: of the plans' manifests."""
    total: dict[str, dict[str, tuple[int, int]]] = {}
    for plan in plans:
        for column, (here, received) in column_bytes(plan).items():
            own = total.setdefault(names[plan.sources.columns[column].manifest], {})
            before = own.get(column, (0, 0))
            own[column] = before[0] + here, before[1] + received
    return [
        Move(
            to,
            of,
            tuple(sorted(columns)),
            sum(here for here, _ in columns.values()),
            sum(received for _, received in columns.values()),
            len(plans),
        )
        for of, columns in total.items()
    ]


def column_bytes(plan: DispatchPlan) -> dict[str, tuple[int, int]]:
    """Bytes of each column that lie on the hosts whose ranks need them, and bytes that they receive
    from other hosts; each once for all ranks of a host."""
    names = sorted({*plan.hosts, *(entry.host for entry in plan.entries)})
    number = {name: index for index, name in enumerate(names)}
    of_shard = np.array([number[entry.host] for entry in plan.entries], dtype=np.int64)
    ranks = enumerate(plan.hosts)
    consumers = sorted({(plan.layout.replica(rank), number[host]) for rank, host in ranks})
    found = {}
    for name, column in plan.sources.columns.items():
        here = received = 0
        for replica, host in consumers:
            rows = plan.members(replica)
            own = of_shard[column.shard[rows]] == host
            here += int(column.length[rows][own].sum())
            received += int(column.length[rows][~own].sum())
        found[name] = here, received
    return found


def expected_manifests(reader: Reader, load: Load) -> dict[str, Manifest]:
    """The manifests that the stages would seal under a load: episodes of equal lengths, one sample
    each, dealt to the engines as `contiguous` does. Nobody knows how long texts are: they are
    counted as empty.
    """
    config, site = reader.config, reader.site
    iteration, size = site.plan.iteration, config.rollout.group_size
    stages = taking_part(config, config.imitates(iteration))
    first = next(stage.name for stage in stages if stage.name in ROWS)
    hosts = site.hosts_of(first)
    prompts = config.rollout.prompts_per_iteration
    parts = [np.array(part) for part in contiguous(range(prompts), len(hosts))]
    begin = iteration * prompts
    ids = [
        ((begin + part[:, None]) * size + np.arange(size)).ravel() << SAMPLE_BITS for part in parts
    ]
    schema = GROUP_SCHEMA if first == "collect" else ROLLOUT_SCHEMA
    shape = max(1, round(load.context)), max(1, round(load.turns))
    found = {first: _manifest(first, iteration, schema, list(zip(hosts, ids, strict=False)), shape)}
    for stage in reading(config, iteration):
        if stage.name not in _WRITTEN:
            continue
        plan = reader.plans(stage.name, found)[-1]
        leaders = range(0, plan.layout.ranks, plan.layout.ranks_per_replica)
        rows = [(plan.hosts[rank], np.sort(plan.rows(rank))) for rank in leaders]
        found[stage.name] = _manifest(stage.name, iteration, _WRITTEN[stage.name], rows, shape)
    return found


def _manifest(
    stage: str,
    iteration: int,
    schema: pa.Schema,
    rows: Sequence[tuple[str, np.ndarray]],
    shape: tuple[int, int],
) -> Manifest:
    """rows: host and int64 sample_ids of each shard. shape: tokens and turns of each row."""
    tokens, turns = shape
    shards = tuple(
        described(
            schema,
            ids,
            {"tokens": np.full(len(ids), tokens), "turns": np.full(len(ids), turns)},
            host,
            f"{iteration:06d}-{stage}-{number}-0.arrow",
        )
        for number, (host, ids) in enumerate(rows)
        if len(ids)
    )
    return Manifest(
        run="", iteration=iteration, stage=stage, key="", policy_version=0, shards=shards
    ).sealed()
