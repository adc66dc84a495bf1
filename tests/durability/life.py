"""The life of a run without models: real records, manifests, shards and checkpoints' steps.

What a stage computes is a hash of what it reads, so that two lives that end with equal weights did
the same work on the same data. It asks before each piece of work what is finished, as flows do.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from earl_core.config import RunConfig, parse_config
from earl_core.dispatch import Manifest
from earl_core.run import RunDirectory, stage_key
from earl_core.run.checkpoints import describe_state, verify_training_state
from earl_core.run.recovery import take_newest_whole
from earl_core.system.files import remove, sync, write_all
from earl_core.tensors.errors import CheckpointError
from earl_core.trajectory.samples import Episode, Sample, VersionSpan, rollout_rows
from earl_core.trajectory.schema import ROLLOUT_SCHEMA

ITERATIONS = 2
Acknowledge = Callable[[str], None]


def life_config(root: Path, **changes: object) -> RunConfig:
    """A run below `root`, its shards too."""
    return parse_config(
        {
            "name": "run",
            "runs_directory": str(root / "runs"),
            "iterations": ITERATIONS,
            "model": {"path": "models/x"},
            "environment": {"name": "tic_tac_toe"},
            "rollout": {"prompts_per_iteration": 4, "group_size": 2, "max_turns": 5},
            "checkpoint": {"keep_last": 1},
            "dispatch": {"directory": str(root / "shm"), "wait_seconds": 0},
            **changes,
        }
    )


def live(config: RunConfig, acknowledge: Acknowledge = lambda what: None) -> str:
    """Open the run, do what is left of it and close it; the digest of its last weights.

    acknowledge: told of each thing that the run promises to keep from then on.
    """
    run = open_run(config)
    try:
        Life(run, acknowledge).go_on()
        weights = weights_of(run, config.iterations - 1)
        run.finish()
        acknowledge("finished")
        return weights
    finally:
        run.close()


def open_run(config: RunConfig) -> RunDirectory:
    """As a controller opens it: a damaged checkpoint is passed over."""
    take_newest_whole(Path(config.runs_directory) / config.name)
    return RunDirectory.open(config)


class Life:
    """One attempt at a run that is open."""

    def __init__(self, run: RunDirectory, acknowledge: Acknowledge = lambda what: None) -> None:
        self.run = run
        self._acknowledge = acknowledge

    def go_on(self) -> None:
        """Do the iterations after the last STABLE one."""
        for number in range(self.run.last_stable() + 1, self.run.config.iterations):
            self.iterate(number)

    def iterate(self, number: int) -> None:
        """One iteration to its STABLE checkpoint."""
        before, judged = self.prepare(number)
        updated = self._update(number, before, judged)
        self._stage(number, "publish", [updated.data_digest()], lambda key: {})
        self.run.observations.append({"iteration": number, "seconds": 1.0})
        self.run.append_metrics(number, {"loss": float(number)})
        self._acknowledge(f"metrics {number}")
        self.run.mark_stable(number)
        self._acknowledge(f"stable {number}")
        self.run.prune_checkpoints()

    def prepare(self, number: int) -> tuple[str, Manifest]:
        """What comes before an update: the weights that it starts from, and its data."""
        before = weights_of(self.run, number - 1)
        played = self._shards(number, "rollout", [before], before)
        return before, self._shards(number, "advantage", [played.data_digest()], _content(played))

    def _shards(self, number: int, stage: str, inputs: list[str], read: str) -> Manifest:
        def work(key: str) -> dict[str, object]:
            sample = Sample()
            sample.begin_turn(list(hashlib.sha256(f"{number} {stage} {read}".encode()).digest()))
            sample.answer([3], [-0.5], [VersionSpan(0, 0, 1)])
            rows = rollout_rows([Episode(0, 0, 0, [sample], "done")])
            entry = self.run.store.publish(
                stage=stage, iteration=number, rank=0, schema=ROLLOUT_SCHEMA, rows=rows
            )
            return {"shards": (entry,)}

        return self._stage(number, stage, inputs, work)

    def _update(self, number: int, before: str, judged: Manifest) -> Manifest:
        inputs = [before, judged.data_digest()]
        key = self._key(number, "update", inputs)
        manifest = self.run.sealed(number, "update", key)
        weights = hashlib.sha256(f"{before} {_content(judged)}".encode()).hexdigest()
        path = self.run.checkpoint_path(number)
        if manifest is not None and _is_whole(path):
            return manifest
        write_checkpoint(path, weights, number + 1)
        outputs = {"digest": weights}
        return self._stage(number, "update", inputs, lambda key: {"outputs": outputs})

    def _key(self, number: int, stage: str, inputs: list[str]) -> str:
        return stage_key(self.run.config, self.run.uid, number, stage, inputs)

    def _stage(
        self, number: int, stage: str, inputs: list[str], work: Callable[[str], dict[str, object]]
    ) -> Manifest:
        key = self._key(number, stage, inputs)
        manifest = self.run.sealed(number, stage, key)
        if manifest is None:
            empty = Manifest(
                run=self.run.uid, iteration=number, stage=stage, key=key, policy_version=number
            )
            manifest = self.run.seal(empty.model_copy(update=work(key)))
        self._acknowledge(f"sealed {number} {stage} {key} {manifest.digest}")
        return manifest


def _content(manifest: Manifest) -> str:
    """What the shards hold; unlike the key the same in every run."""
    return " ".join(entry.checksum for entry in manifest.shards)


def weights_of(run: RunDirectory, number: int) -> str:
    """The weights that an iteration ended with."""
    if number < 0:
        return "initial"
    path = run.checkpoint_path(number) / "policy" / "weights"
    return path.read_text()


def _is_whole(path: Path) -> bool:
    try:
        verify_training_state(path)
    except CheckpointError:
        return False
    return True


def write_checkpoint(path: Path, weights: str, version: int, key: str = "") -> None:
    """By the steps of `write_training_state`: written beside, described, synced, renamed."""
    for stale in path.parent.glob(f".{path.name}.*"):
        remove(stale)
    building = path.parent / f".{path.name}.building"
    (building / "policy").mkdir(parents=True)
    descriptor = os.open(building / "policy" / "weights", os.O_WRONLY | os.O_CREAT, 0o600)
    write_all(descriptor, weights.encode())
    os.close(descriptor)
    describe_state(building, {"policy_version": version, "key": key}, {"weights": [len(weights)]})
    for each in [*building.rglob("*"), building]:
        sync(each)
    if os.path.lexists(path):
        retired = path.parent / f".{path.name}.retired"
        os.rename(path, retired)
        os.rename(building, path)
        remove(retired)
    else:
        os.rename(building, path)
    sync(path.parent)
