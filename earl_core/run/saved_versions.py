"""Published weights on disk, beside the checkpoints: the versions that stale rollouts still play.

A run whose rollouts are stale (`schedule.staleness` above 0) plays versions that no learner holds
any more, and the newest before a resumed learner holds it. Before a checkpoint becomes STABLE they
are copied from shared memory, so that a resume from it finds them. They go with it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from earl_core.dispatch import Manifest, ManifestError
from earl_core.run.directory import RunDirectory
from earl_core.run.policy_versions import carried
from earl_core.system.files import make_directory, remove, writing_atomic

FOLDER = "weights"
_NAME = re.compile(r"weights-([0-9]{8})-[0-9a-f]{32}\.safetensors")


def save_versions(run: RunDirectory, iteration: int) -> None:
    """Copy the versions up to this iteration's that rollouts after it play. Raises `ManifestError`
    for one that is nowhere."""
    for version in run.versions.to_play(iteration):
        published = run.manifest(*run.versions.publication(version))
        hand_over(published, run.path, run.store.directory, run.path)


def hand_over(published: Manifest, run: Path, shared: Path, target: Path) -> None:
    """Copy published weights of a run, from its directory or else from shared memory, to the copies
    of the run directory `target`. Raises `ManifestError` where they are in neither."""
    for file in published.outputs["weights"]["files"]:
        copied = _place(target, published, file)
        if copied.is_file():
            continue
        source = _place(run, published, file)
        if not source.is_file():
            source = shared / Path(file["path"]).name
        try:
            make_directory(copied.parent, mode=0o700)
            with (
                source.open("rb") as read,
                writing_atomic(copied) as descriptor,
                os.fdopen(descriptor, "wb", closefd=False) as write,
            ):
                shutil.copyfileobj(read, write, 1 << 24)
        except FileNotFoundError as error:
            raise ManifestError(
                f"the weights of policy version {carried(published)}, which are still to be "
                f"played, are neither in {source.parent} nor in {run / FOLDER}"
            ) from error


def prune_versions(run: RunDirectory, covered: Iterable[int]) -> None:
    """Remove the copies that belong to none of the checkpoints of these iterations."""
    kept = {version for iteration in covered for version in run.versions.to_play(iteration)}
    for path in (run.path / FOLDER).glob("*"):
        found = _NAME.fullmatch(path.name)
        if found and int(found[1]) not in kept:
            remove(path)


def saved(run: Path, published: Manifest) -> Manifest | None:
    """The manifest of published weights with the files that lie on disk; None where they do not.
    The bytes are not looked at: whoever loads them compares their digest."""
    listed = published.outputs["weights"]["files"]
    files = [{**file, "path": str(_place(run, published, file))} for file in listed]
    for file in files:
        path = Path(file["path"])
        if not path.is_file() or path.stat().st_size != file["bytes"]:
            return None
    weights = {**published.outputs["weights"], "files": files}
    return published.model_copy(update={"outputs": {**published.outputs, "weights": weights}})


def _place(run: Path, published: Manifest, file: dict[str, Any]) -> Path:
    # An update that was done again may have made others of the same number.
    lying = Path(file["path"])
    name = f"{lying.stem}-{published.outputs['weights']['digest']}{lying.suffix}"
    return (run / FOLDER / name).absolute()
