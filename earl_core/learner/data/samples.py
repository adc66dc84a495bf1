"""Training samples from shards: each rank's rows, as views into shared memory; minibatches.

Every rank makes the same plan from the manifests and reads its own rows from it, and only the
columns it needs. Ranks of one replica (context x tensor) map the same rows, whole: tensor ranks
compute on equal data, and context ranks need all tokens to know which beginnings samples share.
They are on one host and share the mapping, so that nothing is received twice. Of the routing, which
is most of a token's bytes, a context rank reads its own tokens' rows; the hashes of all tell where
samples are routed alike. Minibatches say which samples each optimizer step sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from earl_core.algorithms.aggregation import Totals
from earl_core.deployment.shapes import ModelShape
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.dispatch import Batch, Manifest
from earl_core.dispatch.reads.plan import DispatchPlan, Layout, plan_rows
from earl_core.dispatch.reads.sources import Sources, join
from earl_core.learner.data.masks import FORMS
from earl_core.learner.data.packing import TrainingSample
from earl_core.learner.data.parts import ROLE, part_ids
from earl_core.learner.parallel.mesh import UpdateMesh
from earl_core.pretrained.grammars import TokenMasks
from earl_core.run.worker import PlanReads
from earl_core.trajectory.routing import RecordedRouting, RoutingError, RoutingShape
from earl_core.trajectory.schema import ROUTING, ROUTING_HASH, SAMPLE_BITS

if TYPE_CHECKING:
    from earl_core.tensors.collectives import Ranks


SCORED = (
    *("tokens", "loss_mask", "rollout_logprobs", "episode_id", "group_id"),
    *("turn_starts", FORMS),
)
"""Columns of a sample that is scored."""

_VERSIONS = ("policy_version_first", "policy_version_last")

TOKEN_VERSIONS = "token_versions"
"""Column of the versions that sampled each token, where they change within an answer."""

TRAINED = (
    *(*SCORED, ROLE, *_VERSIONS, TOKEN_VERSIONS, ROUTING, ROUTING_HASH),
    *("advantages", "reference_logprobs"),
)
"""Columns of a sample that is trained on; the reference's only where there is one,
the routing where it was recorded."""

LABEL = "environment"
"""Column of the environment's label, read where environments differ."""

Split = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(sample_id, group_id) of all rows → the number of the part of each; all int64."""

_OPTIONAL = ("advantages", "reference_logprobs", "values")


@dataclass(frozen=True)
class RowCost:
    """A row of n tokens costs `linear * n + quadratic * n**2`, in any unit."""

    linear: float = 1.0
    quadratic: float = 0.0

    @classmethod
    def of(cls, model: ModelShape) -> RowCost:
        """Multiplications of a forward pass: the matrices for each token, and the rule of its
        layers with a state, four for each number of one; attention for each pair of a token and one
        before it, in the layers that have it. The backward pass costs twice as much of all.
        """
        linear = model.layers * model.layer_parameters + model.embedding_parameters
        if model.states is not None:
            linear += 4 * model.states.layers * model.states.numbers
        pairs = model.attention_layers * (model.query_size + model.output_size) / 2
        return cls(float(linear), pairs)


@dataclass(frozen=True)
class RankReader:
    """Reads what one rank of a stage works on. hosts: of every rank, as manifests name them."""

    reads: PlanReads
    hosts: tuple[str, ...]
    cost: RowCost = RowCost()

    def open(
        self,
        manifests: Sequence[Manifest],
        mesh: UpdateMesh,
        columns: Sequence[str],
        split: Split | None = None,
        link_bytes: float = 0.0,
        without: np.ndarray | None = None,
    ) -> Batch:
        """The rank's rows of the last manifest, with those of `columns` that any manifest has. The
        batch may be empty. Raises what `join`, `plan_rows` and `Batch` raise."""
        plan = self.plan(manifests, mesh, columns, split, link_bytes, without)
        return self.reads.open(plan, mesh.rank)

    def plan(
        self,
        manifests: Sequence[Manifest],
        mesh: UpdateMesh,
        columns: Sequence[str],
        split: Split | None = None,
        link_bytes: float = 0.0,
        without: np.ndarray | None = None,
    ) -> DispatchPlan:
        """Plan the rows that each rank reads; equal on all ranks. split: into parts that are
        balanced one by one. link_bytes: see `Layout`. without: sample_ids of rows left out.

        An episode is whole on one replica, so that losses over whole episodes are. So is a group if
        that keeps the replicas as even as the layout asks: its episodes begin alike, and the tokens
        that they share are computed once.
        """
        sources = sources_of(manifests, columns, without)
        groups = None
        if mesh.deployment.data_parallel > 1:
            with self.reads.open(groups_plan(sources, self.hosts), mesh.rank) as batch:
                groups = batch.scalars("group_id")
        given = mesh.deployment, self.hosts, self.cost
        return training_plan(sources, *given, groups, split, link_bytes)


def sources_of(
    manifests: Sequence[Manifest], columns: Sequence[str], without: np.ndarray | None = None
) -> Sources:
    """The rows of the last manifest and those of `columns` that any has. without: see
    `RankReader.plan`."""
    there = {name for manifest in manifests for name in manifest.column_names()}
    sources = join(manifests, [name for name in columns if name in there])
    if without is None:
        return sources
    return sources.take(np.flatnonzero(~np.isin(sources.rows, without)))


def groups_plan(sources: Sources, hosts: tuple[str, ...]) -> DispatchPlan:
    """Plan the group_id of all rows, a few bytes a row, for every rank. hosts: of the ranks."""
    everyone = Layout(ranks_per_replica=len(hosts), hosts=hosts)
    return plan_rows(sources.only("group_id"), everyone)


def training_plan(
    sources: Sources,
    readers: StageDeployment,
    hosts: tuple[str, ...],
    cost: RowCost,
    groups: np.ndarray | None = None,
    split: Split | None = None,
    link_bytes: float = 0.0,
) -> DispatchPlan:
    """What `RankReader.plan` says, as a pure function. hosts: of the ranks. groups: int64 group_id
    of each row; None: there is one replica, which has all."""
    layout = Layout(
        data_parallel=readers.data_parallel,
        ranks_per_replica=readers.ranks // readers.data_parallel,
        hosts=hosts,
        linear=cost.linear,
        quadratic=cost.quadratic,
        keep_groups=groups is not None,
        link_bytes=link_bytes,
    )
    if groups is None:
        return plan_rows(sources, layout)
    plans = []
    parts = None if split is None else split(sources.rows, groups)
    for units in (groups, sources.rows >> SAMPLE_BITS):
        plan = plan_rows(sources, layout, groups=units, parts=parts)
        if plan.imbalance <= layout.max_imbalance:
            return plan
        plans.append(plan)
    return min(plans, key=lambda plan: plan.imbalance)


def by_minibatch(
    count: int, *, seed: int, iteration: int, skipped: np.ndarray | None = None
) -> Split:
    """Parts that are the minibatches of the first epoch, after each of which the ranks meet.

    skipped: rows of `sample_table` that are in the minibatches too, and are not to be split. Later
    epochs deal the groups out anew: they are balanced as far as chance does it.
    """

    def split(rows: np.ndarray, groups: np.ndarray) -> np.ndarray:
        columns = [rows, groups, rows >> SAMPLE_BITS, np.ones_like(rows)]
        table = np.stack(columns, axis=1)
        if skipped is not None:
            table = np.concatenate([table, skipped])
        parts = np.zeros(len(rows), dtype=np.int64)
        everything = range(len(rows))
        minibatches = split_table(table, everything, count, seed=seed, iteration=iteration, epoch=0)
        for number, minibatch in enumerate(minibatches):
            parts[list(minibatch.rows)] = number
        return parts

    return split


def training_samples(
    batch: Batch,
    masks: Sequence[TokenMasks | None],
    old_logprobs: Sequence[np.ndarray] | None = None,
    policy_version: int | None = None,
    kl_coefficient: Callable[[str], float] | None = None,
    routing: Sequence[RecordedRouting | None] | None = None,
) -> list[TrainingSample]:
    """One `TrainingSample` per row; its arrays are read-only views that must go before the batch.

    Columns that the batch does not have are None. masks: of each row, by `masks_of`. old_logprobs:
    one array per row. policy_version: which tokens are the current policy's; None: nobody asks.
    kl_coefficient: of an environment's episodes, by its label; None: it is equal for all.
    routing: of each row, by `recorded_routing`; None: nobody follows it.
    """
    there = set(batch.names())
    current = None
    if policy_version is not None and there.issuperset(_VERSIONS):
        current = _current_tokens(batch, policy_version)
    episodes = part_ids(batch)
    groups = batch.scalars("group_id")
    charged = None
    if kl_coefficient is not None:
        charged = [np.float32(kl_coefficient(label)) for label in batch.strings("environment")]
    return [
        TrainingSample(
            tokens=batch.row("tokens", row),
            loss_mask=batch.row("loss_mask", row),
            rollout_logprobs=batch.row("rollout_logprobs", row),
            old_logprobs=None if old_logprobs is None else old_logprobs[row],
            current=None if current is None else current[row],
            kl_coefficient=None
            if charged is None
            else np.full(len(batch.row("tokens", row)), charged[row]),
            masks=masks[row],
            routing=None if routing is None else routing[row],
            episode_id=int(episodes[row]),
            group_id=int(groups[row]),
            sample_id=int(batch.rows[row]),
            **{name: batch.row(name, row) if name in there else None for name in _OPTIONAL},
        )
        for row in range(len(batch))
    ]


def recorded_routing(batch: Batch, experts: RoutingShape | None) -> list[RecordedRouting | None]:
    """The routing of each row, views that must go before the batch; None where it was not recorded.

    experts: of the model. Nothing is read but of shards without hashes, which older releases wrote.
    Raises `RoutingError` for a routing that is not this model's.
    """
    if ROUTING not in batch.names():
        return [None] * len(batch)
    if experts is None:
        raise RoutingError(
            "its tokens have a routing, but the model that is trained has no routers that follow it"
        )
    hashed = ROUTING_HASH in batch.names()
    return [
        RecordedRouting(
            experts,
            batch.row(ROUTING, row),
            len(batch.row("tokens", row)),
            f"sample {int(batch.rows[row])}",
            batch.row(ROUTING_HASH, row) if hashed else None,
        )
        for row in range(len(batch))
    ]


def _current_tokens(batch: Batch, policy_version: int) -> list[np.ndarray] | None:
    """Mark the tokens of each row, uint8 [L], with 1 in the turns that this policy alone has
    answered; None when that is every turn."""
    answered = []
    for row in range(len(batch)):
        first, last = (batch.row(name, row) for name in _VERSIONS)
        # A turn without an answer has version -1, and no trained tokens.
        answered.append(((first == policy_version) & (last == policy_version)) | (last < 0))
    if all(turns.all() for turns in answered):
        return None
    current = []
    for row, turns in enumerate(answered):
        starts, length = batch.row("turn_starts", row), len(batch.row("tokens", row))
        sizes = np.diff(np.append(starts, length))
        # Tokens before the first turn belong to nobody's answer.
        given = np.zeros(int(starts[0]) if len(starts) else length, dtype=np.uint8)
        current.append(np.concatenate([given, np.repeat(turns, sizes).astype(np.uint8)]))
    return current


@dataclass(frozen=True)
class Minibatch:
    """The samples of one optimizer step. A role's part of an episode stands for an episode, where
    conversations have roles (`data.parts`).

    rows: indices into the update's samples, those of this rank; none where all are skipped.
    totals: its trained tokens, and episodes with any, over all ranks. token_counts: trained tokens
    of each of its episodes over all its samples. iteration: the update's, from 0.
    """

    rows: tuple[int, ...]
    totals: Totals
    token_counts: dict[int, int]
    iteration: int


def sample_table(samples: Sequence[TrainingSample]) -> np.ndarray:
    """Tabulate the facts that a split needs of samples, int64 [rows, 4]: sample, group, episode,
    trained tokens."""
    rows = [
        (each.sample_id, each.group_id, each.episode_id, np.count_nonzero(each.loss_mask))
        for each in samples
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


def episodes_on_several(tables: Sequence[np.ndarray]) -> list[int]:
    """Episodes with samples in more than one of the ranks' tables."""
    found, ranks = np.unique(
        np.concatenate([np.unique(table[:, 2]) for table in tables]), return_counts=True
    )
    return [int(episode) for episode in found[ranks > 1]]


def gathered_table(
    ranks: Ranks, samples: Sequence[TrainingSample], skipped: np.ndarray, whole_episodes: bool
) -> tuple[np.ndarray, range]:
    """Gather the table that decides the minibatches, of all ranks' samples and then of the skipped
    ones, and the range of this rank's rows. Collective.

    Raises ValueError where an episode that must be whole is on several ranks.
    """
    parts = ranks.gather_rows(sample_table(samples))
    if whole_episodes and (torn := episodes_on_several(parts)):
        raise ValueError(
            f"Episode {torn[0]} has samples on several ranks, but the algorithm needs all "
            "samples of an episode together: deal whole episodes or groups to the ranks."
        )
    first = sum(map(len, parts[: ranks.rank]))
    return np.concatenate([*parts, skipped]), range(first, first + len(samples))


def split_table(
    table: np.ndarray,
    own: range,
    count: int,
    *,
    seed: int,
    iteration: int,
    epoch: int,
    skipped: int = 0,
) -> list[Minibatch]:
    """Cut the samples into at most `count` minibatches of whole groups.

    table: `sample_table` of all ranks' samples; own: which of its rows are this rank's; skipped:
    how many of the last ones are nobody's.
    Groups are put in an order hashed from (seed, iteration, epoch, group), so the split depends
    on nothing else, least of all on which rank has which sample, and are dealt out in equal numbers
    as far as possible. With fewer groups than `count` there are fewer minibatches. Rows keep their
    order inside a minibatch; one without a trained token is left out.
    """
    _, group_ids, episode_ids, trained = table.T
    groups, group_of_row = np.unique(group_ids, return_inverse=True)

    def draw(index: int) -> tuple[int, int]:
        text = f"minibatch|{seed}|{iteration}|{epoch}|{groups[index]}"
        return xxhash.xxh3_64_intdigest(text.encode()), int(groups[index])

    order = sorted(range(len(groups)), key=draw)
    minibatches = []
    for part in np.array_split(np.array(order, dtype=np.int64), max(1, min(count, len(order)))):
        rows = np.flatnonzero(np.isin(group_of_row, part))
        episodes, episode_of_row = np.unique(episode_ids[rows], return_inverse=True)
        sums = np.bincount(episode_of_row, weights=trained[rows], minlength=len(episodes))
        counts = dict(zip(episodes.tolist(), sums.astype(np.int64).tolist(), strict=True))
        if any(counts.values()):
            mine = rows[(rows >= own.start) & (rows < own.stop)] - own.start
            out = int(trained[rows[rows >= len(table) - skipped]].sum())
            totals = Totals.from_token_counts(counts.values(), out)
            minibatches.append(Minibatch(tuple(mine.tolist()), totals, counts, iteration))
    return minibatches
