"""A run directory in which an iteration of another run is done again; that run is only read.

It is a run with a uid of its own. It gets the checkpoint that the iteration starts from, its sealed
stages, and copies of those shards that are still there, in shared memory or in the spill.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from earl_core.config import ConfigError, RunConfig
from earl_core.config.run import KEPT_ADAPTER, KEPT_ANCESTOR, KEPT_REFERENCES
from earl_core.deployment.stages import STAGES, stage_of
from earl_core.dispatch import Manifest, ManifestError, ShardEntry, ShardStore, read_manifest
from earl_core.dispatch.segments.pool_directory import new_uid
from earl_core.dispatch.shards.manifest import sealed_path, write_manifest
from earl_core.dispatch.spill.storage import Spill, SpillError
from earl_core.run.checkpoints import MARKER, holding_checkpoint, stable_checkpoints
from earl_core.run.policy_versions import INITIAL_VERSION, PolicyVersions
from earl_core.run.record import (
    STALENESS,
    read_record,
    read_uid,
    staleness_over_iterations,
    write_record,
)
from earl_core.run.run_stores import run_store
from earl_core.run.saved_versions import hand_over
from earl_core.system.files import link_or_copy, make_directory, write_atomic


def rehearse(run: Path, config: RunConfig, iteration: int, target: Path, wanted: RunConfig) -> None:
    """Make the run directory `target`, which iteration `iteration` of `run` can be done in.

    config: of the run. wanted: of the rehearsal. A stage whose shards are gone has no seal there.
    Raises `ConfigError` when the weights that the iteration starts from are gone.
    """
    make_directory(target, mode=0o700)
    for folder in (KEPT_ANCESTOR, KEPT_ADAPTER, KEPT_REFERENCES):
        if (run / folder).is_dir():
            shutil.copytree(
                run / folder, target / folder, symlinks=True, copy_function=link_or_copy
            )
    _copy_checkpoint(run, iteration, target)
    uid = new_uid()
    staleness = config.schedule.pinned
    over = staleness_over_iterations(read_record(run), staleness, iteration)
    write_record(target, {"uid": uid, "attempts": 0, STALENESS: over})
    store = run_store(target, wanted)
    for back, stage in ((1, "rollout"), (1, "update"), (1 + staleness, "reward")):
        with suppress(ManifestError):
            # Where the environments of a mixture stood, and the policy version that was made.
            before = _manifest(run, iteration - back, stage).model_copy(update={"shards": ()})
            _seal(target, before, uid)
    if staleness:
        _copy_played(run, config, iteration, target, uid, over)
    sealed_here = sealed_path(run, iteration, "").parent.glob("*.json")
    made = {stage.name: stage.makes for stage in STAGES.values()}
    # Those of waves of prompts, too.
    sealed = sorted(path.stem for path in sealed_here)
    for stage in (name for name in sealed if made.get(stage_of(name)) in ("plan", "columns")):
        with suppress(ManifestError, SpillError):
            manifest = _manifest(run, iteration, stage)
            _copy_shards(run, config, manifest, store)
            _seal(target, manifest, uid)


def _manifest(run: Path, iteration: int, stage: str) -> Manifest:
    if iteration < 0:
        raise ManifestError("there is nothing before the first iteration")
    return read_manifest(sealed_path(run, iteration, stage))


def _seal(target: Path, manifest: Manifest, uid: str) -> None:
    path = sealed_path(target, manifest.iteration, manifest.stage)
    make_directory(path.parent)
    write_manifest(path, manifest.model_copy(update={"run": uid, "digest": ""}))


def _copy_checkpoint(run: Path, iteration: int, target: Path) -> None:
    versions = PolicyVersions(run)
    version = versions.before(iteration)
    if version == INITIAL_VERSION:
        return
    maker, stable = versions.maker(version), stable_checkpoints(run)
    if maker not in stable:
        there = ", ".join(str(number + 1) for number in stable)
        raise ConfigError(
            f"iteration {iteration} of {run} starts from weights that are gone: give an iteration "
            f"whose checkpoint before it was kept: 0{', ' if there else ''}{there}; "
            "checkpoint.keep_last keeps more"
        )
    name = f"{maker:06d}"
    source = run / "checkpoints" / name
    with holding_checkpoint(source / MARKER):
        shutil.copytree(source, target / "checkpoints" / name, copy_function=link_or_copy)


def _copy_played(
    run: Path,
    config: RunConfig,
    iteration: int,
    target: Path,
    uid: str,
    staleness: Sequence[tuple[int, int]],
) -> None:
    """Copy the weights that the iteration's rollout plays if its checkpoint holds newer ones."""
    versions = PolicyVersions(run, staleness)
    if (version := versions.played(iteration)) < versions.before(iteration):
        with suppress(ManifestError):
            published = _manifest(run, *versions.publication(version))
            hand_over(published, run, run_store(run, config).directory, target)
            _seal(target, published, uid)


def _copy_shards(run: Path, config: RunConfig, manifest: Manifest, store: ShardStore) -> None:
    """Raises `ManifestError` or `SpillError` when one of them is gone."""
    if not manifest.shards:
        return
    source = run_store(run, config)
    store.prepare()
    for entry in manifest.shards:
        store.reserve(entry.bytes)
        try:
            _copy(source, entry, store)
        except ManifestError:
            if config.dispatch.spill_url is None:
                raise
            Spill(config.dispatch.spill_url, read_uid(run)).restore(entry, store.path(entry))


def _copy(source: ShardStore, entry: ShardEntry, store: ShardStore) -> None:
    mapped = source.open(entry, verify=True)
    try:
        write_atomic(store.path(entry), bytes(mapped.memory))
    finally:
        mapped.close()
