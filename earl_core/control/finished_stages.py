"""Which stages of an iteration are finished: what the run directory says, checked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from earl_core.control.run_controller import RunController, Verdict
from earl_core.dispatch import Manifest
from earl_core.run import stage_key
from earl_core.run.training_state import read_state, verify_training_state
from earl_core.tensors.errors import CheckpointError


def judge(controller: RunController, iteration: int, stage: str, inputs: Sequence[str]) -> Verdict:
    """Decide whether the stage must run; the flow asks once and the stage's task is told.

    inputs: data digests of the stage's inputs, in order.
    """
    key = key_of(controller, iteration, stage, inputs)
    verdict = Verdict(key, finished(controller, iteration, stage, key))
    controller.verdicts[iteration, stage] = verdict
    return verdict


def key_of(controller: RunController, iteration: int, stage: str, inputs: Sequence[str]) -> str:
    """The key that this stage's sealed manifest must carry to count as finished."""
    return stage_key(controller.config, controller.run.uid, iteration, stage, inputs)


def finished(controller: RunController, iteration: int, stage: str, key: str) -> Manifest | None:
    """The stage's manifest if the run directory says that it need not run again."""
    manifest = controller.run.sealed(iteration, stage, key)
    if manifest is None:
        return None
    if stage == "update" and not _state_exists(controller, manifest):
        return None
    if stage == "publish" and not weights_exist(manifest):
        return None
    return manifest


def _state_exists(controller: RunController, manifest: Manifest) -> bool:
    held = controller.live_version == manifest.iteration + 1
    return held or holds_update(controller, manifest, checksums=True)


def holds_update(controller: RunController, update: Manifest, checksums: bool = False) -> bool:
    """Whether the checkpoint of a sealed update's iteration is there, whole, and that update's.

    The key tells it from the checkpoint of another attempt at the iteration, whose settings or
    data were others. checksums: read all of its bytes too; whoever loads them does in any case.
    """
    directory = controller.run.checkpoint_path(update.iteration)
    if not directory.is_dir():
        return False
    try:
        state = verify_training_state(directory) if checksums else read_state(directory)["state"]
    except CheckpointError as error:
        controller.run.note(update.iteration, "checkpoint", f"not usable: {error}")
        return False
    return bool(state.get("key") == update.key)


def weights_exist(manifest: Manifest) -> bool:
    """Whether the published files that a publish manifest names are there, at full size."""
    files = manifest.outputs["weights"]["files"]
    return all(
        Path(file["path"]).is_file() and Path(file["path"]).stat().st_size == file["bytes"]
        for file in files
    )
