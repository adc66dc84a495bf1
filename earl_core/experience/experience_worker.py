"""The rank of the `experience` worker group: rewards and advantages of its own rows.

Every rank gets the same manifests and plans the same split; it reads the rows of its own groups,
writes a shard of its own, and takes part in every call even when it has no rows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from earl_core.algorithms.advantages import ADVANTAGE_ESTIMATORS
from earl_core.algorithms.moments import RankStatistics
from earl_core.config import RunConfig
from earl_core.dispatch import Batch, Manifest
from earl_core.dispatch.reads.plan import DispatchPlan, Layout, plan_rows
from earl_core.dispatch.reads.sources import join, sample_ids
from earl_core.dispatch.shards.manifest import ShardEntry
from earl_core.experience.advantage import advantage_rows, advantage_statistics
from earl_core.experience.alike_groups import JudgedGroups, left_out_rows
from earl_core.experience.group_returns import group_returns, group_rewards
from earl_core.experience.probe import PROBE, Places, probed_episodes
from earl_core.experience.reward import ScoreTally, reward_rows
from earl_core.experience.roles import RoleMoments, role_returns
from earl_core.experience.row_results import row_results
from earl_core.experience.scoring import Scorer, Scores, scored_episodes
from earl_core.experience.seen_rewards import seen_rewards
from earl_core.guard.seen import SEEN, Bounds
from earl_core.run.replay import new_rows, replayed_groups
from earl_core.run.worker import RunWorker
from earl_core.system import fault_points
from earl_core.trajectory.samples import Rows
from earl_core.trajectory.schema import ADVANTAGE_SCHEMA, REWARD_SCHEMA, SAMPLE_BITS


class ExperienceWorker(RunWorker):
    """Reads shards named by manifests, writes new columns for the same rows."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._shards = self._reads()
        self._scorer = Scorer(
            self._config,
            self._context.log_path,
            self._run_directory,
            self._context.here,
            self._context.rank,
            self._context.report,
        )

    async def reward(
        self,
        manifests: list[dict[str, Any]],
        shards_of: str = "reward",
        before: int = 0,
        scored: Sequence[dict[str, Any]] = (),
        bounds: Mapping[str, Bounds] | None = None,
        probe: Places | None = None,
    ) -> dict[str, Any]:
        """Rewards of the rank's episodes in the rollout manifest; `scores`, a dumped `ScoreTally`;
        `roles`, dumped `RoleMoments`; for a curriculum `returns`, a dumped `GroupReturns` of each
        environment, and `rows`, as `row_results`; `groups`, dumped `JudgedGroups`, where groups
        that score alike leave the batch; `guard`, a dumped `Seen` of each source, where there are
        `bounds`; `probe`, a dumped `Asked` in the first rank.

        shards_of: the name that the shards begin with. before: episodes that the iteration has
        scored already, among which failures count. scored: references to rewards of earlier
        iterations, whose scores groups that are trained again keep; what functions could not score
        in its own iteration is not asked for again. bounds: of what sources can give; None: nobody
        looks. probe: what functions score again. Raises as `Scorer.score` does."""
        started, settings = time.perf_counter(), self._config.reward
        given, tally, scores = None, ScoreTally(), Scores()
        rollout = self._manifests(manifests)[0]
        new = np.unique(sample_ids(new_rows(rollout)) >> SAMPLE_BITS)
        with self._open(manifests) as batch:
            if not len(batch):
                return {**self._result([], {}, 0, started), "scores": {}, "groups": {}}
            if settings.functions:
                known, settled = self._known_scores(rollout, scored)
                asked = _unscored(scored_episodes(batch), known, settled)
                again = {each["episode_id"] for each in asked}.difference(new.tolist())
                scores = await self._unless_cancelled(
                    self._scorer.score(asked, before + len(new), without=again)
                )
                given, tally = known | scores.given, scores.tally(again)
            own = self._config.own_weight if self._config.mixture else None
            old = replayed_groups(rollout)
            rows, metrics, episodes = reward_rows(batch, settings, given, own, old)
            learnt = group_returns(batch, rows) if self._config.curriculum else {}
            of_rows = row_results(batch, rows, self._config.row_curricula, old)
            without = {g: each for g, each in group_rewards(batch, rows).items() if g not in old}
            of_roles = RoleMoments.of(role_returns(batch, rows, old) or {"": without})
            seen = {} if bounds is None else seen_rewards(batch, given, scores.invalid, bounds, old)
            groups: dict[str, Any] = {}
            if self._config.rollout.filters_groups:
                every = role_returns(batch, rows).values() or [group_rewards(batch, rows)]
                groups = JudgedGroups.of_roles(map(JudgedGroups.of, every)).model_dump()
        written = len(list(rows.numbers["sample_id"]))
        entries = [self._publish(shards_of, REWARD_SCHEMA, rows)] if written else []
        result = self._result(entries, metrics, episodes, started)
        told = {
            "scores": tally.model_dump(mode="json"),
            "roles": of_roles.model_dump(mode="json"),
            "returns": {label: each.model_dump(mode="json") for label, each in learnt.items()},
            "rows": of_rows,
            "groups": groups,
            SEEN: {source: each.model_dump(mode="json") for source, each in seen.items()},
        }
        return {**result, **told, **await self._asked(probe, bounds)}

    async def _asked(
        self, probe: Places | None, bounds: Mapping[str, Bounds] | None
    ) -> dict[str, Any]:
        """What functions answer to the probe, in the first rank."""
        if not probe or self._context.rank:
            return {}
        probed = probed_episodes(self._run_directory, probe)
        answers = await self._unless_cancelled(self._scorer.ask_again(probed, bounds or {}))
        return {PROBE: answers.model_dump(mode="json")}

    def _known_scores(
        self, rollout: Manifest, scored: Sequence[dict[str, Any]]
    ) -> tuple[dict[int, dict[str, float]], set[int]]:
        """The scores that the episodes of groups that are trained again have already; and the
        groups among these whose other episodes could not be scored in their own iteration. scored:
        as of `reward`."""
        known: dict[int, dict[str, float]] = {}
        again = np.setdiff1d(sample_ids(rollout), sample_ids(new_rows(rollout)))
        everyone = Layout(ranks_per_replica=self._context.world_size, hosts=self._hosts)
        homes = set()
        for rewards in self._manifests(list(scored)):
            homes.add(rewards.iteration)
            rows = np.intersect1d(again, sample_ids(rewards))
            plan = plan_rows(join([rewards], ("scores",), rows), everyone)
            with self._shards.open(plan, self._context.rank) as batch:
                episodes = (batch.rows >> SAMPLE_BITS).tolist()
                known |= dict(zip(episodes, map(json.loads, batch.strings("scores")), strict=True))
        size = self._config.rollout.prompts_per_iteration
        return known, {group for group in replayed_groups(rollout) if group // size in homes}

    async def close(self) -> None:
        """End the processes of the reward functions."""
        await self._scorer.close()

    def _coefficient(self, label: str, factor: float) -> float:
        """The KL coefficient of an environment's episodes in this iteration."""
        return factor * self._config.penalty(label).at(self._context.iteration or 0)

    def advantage_statistics(
        self,
        manifests: list[dict[str, Any]],
        quarantined: Sequence[int] = (),
        kl_factor: float = 1.0,
    ) -> dict[str, Any]:
        """Compute the statistics of this rank's episodes that `advantage` needs in every rank;
        arguments as there."""
        algorithm = self._config.algorithm
        coefficient = partial(self._coefficient, factor=kl_factor)
        with self._open(manifests, quarantined) as batch:
            return advantage_statistics(batch, algorithm, coefficient).model_dump()

    def advantage(
        self,
        manifests: list[dict[str, Any]],
        statistics: dict[str, Any],
        quarantined: Sequence[int] = (),
        kl_factor: float = 1.0,
    ) -> dict[str, Any]:
        """Advantages from the rollout's, the reward's and, if given, the reference's manifest.
        statistics: those of all ranks, merged. quarantined: ids of episodes that have left.
        kl_factor: of the KL coefficients in the reward."""
        started = time.perf_counter()
        with self._open(manifests, quarantined) as batch:
            if not len(batch):
                return self._result([], {}, 0, started)
            rows, metrics, tokens = advantage_rows(
                batch,
                self._config.algorithm,
                RankStatistics.model_validate(statistics),
                partial(self._coefficient, factor=kl_factor),
            )
        if not metrics["episodes_kept"]:
            return self._result([], metrics, tokens, started)
        entry = self._publish("advantage", ADVANTAGE_SCHEMA, rows)
        return self._result([entry], metrics, tokens, started)

    def _publish(self, stage: str, schema: pa.Schema, rows: Rows) -> ShardEntry:
        context, iteration = self._context, self._context.iteration or 0
        entry = self._shards.store.publish(
            stage=stage, iteration=iteration, rank=context.rank, schema=schema, rows=rows
        )
        fault_points.point(f"{stage}.written", iteration)
        return entry

    def _open(self, manifests: list[dict[str, Any]], quarantined: Sequence[int] = ()) -> Batch:
        """The rank's own rows; `manifests` begin with the rollout's.

        An episode is whole on one rank, and so is a group where an estimator or the curriculum
        compares its episodes, because then its moments need not leave the rank. The rollout alone
        decides, so that an advantage is computed where its reward was; without the rows that it
        says are not trained on. No rows where there are fewer units than ranks.
        """
        parsed = self._manifests(manifests)
        rank, ranks = self._context.rank, self._context.world_size
        rows = np.setdiff1d(sample_ids(parsed[0]), left_out_rows(parsed[0]))
        units = rows >> SAMPLE_BITS
        if ranks > 1 and keeps_groups(self._config):
            everyone = Layout(ranks_per_replica=ranks, hosts=self._hosts)
            groups = join(parsed[:1], ("group_id",), rows)
            with self._shards.open(plan_rows(groups, everyone), rank) as batch:
                units = batch.scalars("group_id")
        plan = episodes_plan(parsed, rows, units, self._hosts, quarantined)
        return self._shards.open(plan, rank)

    def _result(
        self, shards: list[ShardEntry], metrics: dict[str, float], weight: int, started: float
    ) -> dict[str, Any]:
        seconds = time.perf_counter() - started
        return {
            "shards": [entry.model_dump(mode="json") for entry in shards],
            "metrics": {**metrics, "seconds": seconds, **self._shards.spent()},
            "weight": weight,
        }


def keeps_groups(config: RunConfig) -> bool:
    """Tell whether an estimator or the curriculum compares the episodes of a group."""
    estimator = ADVANTAGE_ESTIMATORS.build(config.algorithm.advantage)
    return estimator.needs_groups or bool(config.curriculum)


def _unscored(
    episodes: Iterable[dict[str, Any]], known: Collection[int], settled: Collection[int]
) -> list[dict[str, Any]]:
    """The episodes that have no scores already, but those of groups where none is asked for."""
    return [
        each
        for each in episodes
        if each["episode_id"] not in known and each["group_id"] not in settled
    ]


def episodes_plan(
    manifests: Sequence[Manifest],
    rows: np.ndarray,
    units: np.ndarray,
    hosts: tuple[str, ...],
    quarantined: Sequence[int] = (),
) -> DispatchPlan:
    """Plan the rows, all columns, that each rank works on; as `ExperienceWorker` says.

    manifests: the rollout's first. rows: int64 sample_ids that are trained on. units: int64, what
    of each row is on one rank, its episode or its group. hosts: of the ranks.
    quarantined: ids of episodes that have left.
    """
    layout = Layout(data_parallel=len(hosts), hosts=hosts, keep_groups=True)
    plan = plan_rows(join(manifests[:1], rows=rows), layout, groups=units)
    for rewards in (manifest for manifest in manifests if manifest.stage == "reward"):
        # Others could not be scored, or are not to be believed.
        kept = np.isin(plan.sources.rows, sample_ids(rewards))
        kept &= ~np.isin(plan.sources.rows >> SAMPLE_BITS, quarantined)
        sources = plan.sources.take(np.flatnonzero(kept))
        plan = replace(plan, sources=sources, owner=plan.owner[kept])
    return replace(plan, sources=join(manifests, rows=plan.sources.rows))
