"""A recorded iteration in shared memory, and the workers that train on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from earl_core.cluster.rank_process import WorkerContext
from earl_core.cluster.worker_group import WorkerGroup
from earl_core.config import parse_config
from earl_core.dispatch import Manifest, ShardEntry, ShardStore
from earl_core.dispatch.shards.manifest import sealed_path, write_manifest
from earl_core.learner.update_worker import LearnerWorker
from earl_core.run.record import write_record
from earl_core.run.run_stores import run_store
from earl_core.trajectory.samples import Episode, Sample, VersionSpan, rollout_rows
from earl_core.trajectory.schema import ADVANTAGE_SCHEMA, REFERENCE_SCHEMA, ROLLOUT_SCHEMA
from tests.columns import list_column, write_columns
from tests.learner.helpers import VOCABULARY, save_model

GROUP_SIZE = 2


@dataclass
class Recorded:
    """A run directory with a model and, for each iteration asked for, its sealed manifests.

    alike: groups whose episodes have no advantage.
    """

    root: Path
    config: dict[str, Any]
    alike: tuple[int, ...] = ()
    groups: list[WorkerGroup] = field(default_factory=list)

    @classmethod
    def make(cls, root: Path, alike: tuple[int, ...] = (), **update: Any) -> Recorded:
        save_model("llama", root / "model")
        (root / "run").mkdir()
        write_record(root / "run", {"uid": "0123456789ab"})
        config = {
            "name": "run",
            "iterations": 8,
            "model": {"path": str(root / "model")},
            "environment": {"name": "tic_tac_toe"},
            "rollout": {
                "engine": "torch",
                "prompts_per_iteration": 6,
                "group_size": GROUP_SIZE,
                "max_turns": 3,
                "max_tokens_per_turn": 8,
            },
            "algorithm": {
                "kl": {"placement": "loss", "coefficient": 0.01},
                "importance_correction": {"cap": 1.5},
            },
            "update": {
                "precision": "fp32",
                "learning_rate": 1e-4,
                "epsilon": 1e-5,
                "minibatches": 2,
                "max_tokens_per_microbatch": 70,
                "threads": 1,
                # The recorded log-probs are no model's.
                "max_mismatch": 100.0,
                **update,
            },
            "dispatch": {"directory": str(root / "shm")},
        }
        return cls(root, config, alike)

    @property
    def store(self) -> ShardStore:
        return run_store(self.root / "run", parse_config(self.config))

    @property
    def arguments(self) -> dict[str, Any]:
        return {"config": self.config, "run_directory": str(self.root / "run")}

    def references(self, iteration: int, groups: int = 5) -> list[dict[str, Any]]:
        """What workers take for `manifests`."""
        fields = {"iteration", "stage", "digest"}
        return [each.model_dump(include=fields) for each in self.manifests(iteration, groups)]

    def manifests(self, iteration: int, groups: int = 5) -> list[Manifest]:
        """Rollout (in two shards), reference and advantage; the first group was dropped."""
        draw = np.random.default_rng(iteration)
        episodes = [_episode(number, iteration, draw) for number in range(groups * GROUP_SIZE)]
        half = len(episodes) // 2
        rollout = [
            self.store.publish(
                stage="rollout",
                iteration=iteration,
                rank=rank,
                schema=ROLLOUT_SCHEMA,
                rows=rollout_rows(part),
            )
            for rank, part in enumerate((episodes[:half], episodes[half:]))
        ]
        entries = {
            "rollout": rollout,
            "reference": [self._column(iteration, "reference", episodes, draw)],
            "advantage": [self._column(iteration, "advantage", episodes[GROUP_SIZE:], draw)],
        }
        return [
            write_manifest(
                sealed_path(self.root / "run", iteration, stage),
                Manifest(
                    run="0123456789ab",
                    iteration=iteration,
                    stage=stage,
                    key="k",
                    policy_version=iteration,
                    shards=tuple(shards),
                ),
            )
            for stage, shards in entries.items()
        ]

    def _column(
        self, iteration: int, stage: str, episodes: list[Episode], draw: np.random.Generator
    ) -> ShardEntry:
        schema = {"reference": REFERENCE_SCHEMA, "advantage": ADVANTAGE_SCHEMA}[stage]
        rows = [sample for episode in episodes for sample in episode.samples]
        groups = [episode.group_id for episode in episodes for _ in episode.samples]
        ids = [e.episode_id << 16 | k for e in episodes for k in range(len(e.samples))]
        values = [draw.normal(size=len(sample.tokens)) for sample in rows]
        if stage == "advantage":
            values = [
                np.full(len(sample.tokens), draw.normal() * (group not in self.alike))
                for sample, group in zip(rows, groups, strict=True)
            ]
        else:
            values = [value * 0.3 - 3.7 for value in values]
        return write_columns(
            self.store,
            stage=stage,
            iteration=iteration,
            rank=0,
            schema=schema,
            columns={
                "sample_id": np.array(ids, dtype=np.int64),
                schema.names[1]: list_column(values, "float32"),
            },
        )

    def alone(self) -> tuple[LearnerWorker, WorkerContext]:
        """A learner of one rank in this process; its context says which iteration it is."""
        context = WorkerContext(0, 1, "update", self.root / "alone.log", stage="update")
        deployment = {"stage": "update", "threads": 1}
        return LearnerWorker(context, deployment, **self.arguments), context

    def group(self, target: str, deployment: dict[str, Any], **settings: Any) -> WorkerGroup:
        """A started group of the deployment's ranks."""
        role = deployment["stage"]
        group = WorkerGroup(
            role,
            target,
            log_directory=self.root / "logs",
            environment={"OMP_NUM_THREADS": "1"},
            heartbeat_seconds=0.3,
            **settings,
        )
        self.groups.append(group)
        group.start(deployment, self.arguments, world_size=2)
        return group

    def close(self) -> None:
        for group in self.groups:
            group.stop(grace_seconds=2)
        self.store.remove()


def _episode(number: int, iteration: int, draw: np.random.Generator) -> Episode:
    """One to three turns; the episodes of a group begin alike."""
    group = number // GROUP_SIZE
    opening = np.random.default_rng((iteration, group)).integers(0, VOCABULARY, 9)
    sample = Sample()
    for turn in range(int(draw.integers(1, 4))):
        observed = opening if turn == 0 else draw.integers(0, VOCABULARY, 4)
        answered = int(draw.integers(1, 9))
        sample.begin_turn(observed.tolist())
        sample.answer(
            draw.integers(0, VOCABULARY, answered).tolist(),
            (draw.normal(size=answered) * 0.3 - 3.7).tolist(),
            [VersionSpan(iteration, 0, answered)],
        )
    return Episode(number, group, group, [sample], "done")
