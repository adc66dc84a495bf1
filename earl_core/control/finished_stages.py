"""Which stages of an iteration are finished: what the run directory says, checked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from earl_core.control.resume_point import is_updated
from earl_core.control.run_controller import RunController, Verdict
from earl_core.dispatch import Manifest
from earl_core.run import stage_key


def judge(controller: RunController, iteration: int, stage: str, inputs: Sequence[str]) -> Verdict:
    """Decide whether the stage must run; the flow asks once and the stage's task is told.

    inputs: data digests of the stage's inputs, in order.
    """
    key = key_of(controller, iteration, stage, inputs)
    known = controller.run.sealed(iteration, stage, key)
    if known is not None and stage == "update":
        held = controller.live_version == iteration + 1
        if not held and not is_updated(controller.run, iteration, checksums=True):
            known = None
    if known is not None and stage == "publish" and not weights_exist(controller, known):
        known = None
    verdict = Verdict(key, known)
    controller.verdicts[iteration, stage] = verdict
    return verdict


def key_of(controller: RunController, iteration: int, stage: str, inputs: Sequence[str]) -> str:
    """The key that this stage's sealed manifest must carry to count as finished."""
    return stage_key(controller.config, controller.run.uid, iteration, stage, inputs)


def weights_exist(controller: RunController, manifest: Manifest) -> bool:
    """Whether every host has the files that a publish manifest names, at full size."""
    files = manifest.outputs["weights"]["files"]
    return all(controller.run.stores.have(Path(file["path"]).name, file["bytes"]) for file in files)
