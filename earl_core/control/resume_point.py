"""The point at which a run goes on: the one place that says which updates are done, and where their
state lies.

An iteration is done once a STABLE checkpoint covers it, or this process has finished it. Its update
is done once it is sealed and its checkpoint is there; without one only the live learner has it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from earl_core.config import RunConfig
from earl_core.deployment.stages import STAGES, taking_part
from earl_core.dispatch import ManifestError
from earl_core.run import RunDirectory
from earl_core.run.checkpoints import check_state, read_state, state_path, verify_training_state
from earl_core.run.policy_versions import INITIAL_VERSION
from earl_core.system.errors import EarlError
from earl_core.tensors.errors import CheckpointError


class StateLost(EarlError):
    """The live training state is not the one this iteration starts from."""


class ResumePoint(NamedTuple):
    """iteration: the next one. stage: its first stage without a seal, `publish` where all have one;
    `control.stage_execution` says which seals count. state: the checkpoint of the newest policy
    version; None: the initial model."""

    iteration: int
    stage: str
    state: Path | None


def resume_point(run: RunDirectory, finished: int = -1) -> ResumePoint:
    """Find the point at which the run goes on. finished: the last iteration that this process has
    finished, with or without a checkpoint."""
    stable = run.last_stable()
    iteration = max(finished, stable) + 1
    stages = [each.name for each in taking_part(run.config, run.config.imitates(iteration))]
    unsealed = (stage for stage in stages if not run.stage_path(iteration, stage).is_file())
    covered = iteration if is_updated(run, iteration) else stable
    state = run.checkpoint_path(covered).resolve() if covered >= 0 else None
    return ResumePoint(iteration, next(unsealed, stages[-1]), state)


def is_covered(run: RunDirectory, iteration: int) -> bool:
    """Tell whether all that the iteration trains `is_updated`, which STABLE says of it."""
    stages = taking_part(run.config, run.config.imitates(iteration))
    return all(is_updated(run, iteration, s.name) for s in stages if s.makes == "state")


def is_updated(
    run: RunDirectory, iteration: int, stage: str = "update", checksums: bool = False
) -> bool:
    """Tell whether the iteration's update, or another stage that trains, is sealed, and its state
    in the checkpoint there, whole, and that update's.

    The key tells it from the checkpoint of another attempt at the iteration, whose settings or
    data were others. checksums: read all of its bytes too; whoever loads them does in any case.
    """
    directory = state_path(run.checkpoint_path(iteration), STAGES[stage].role)
    if not directory.is_dir():
        return False
    try:
        update = run.manifest(iteration, stage)
        state = verify_training_state(directory) if checksums else read_state(directory)["state"]
    except ManifestError:
        return False
    except CheckpointError as error:
        run.note(iteration, "checkpoint", f"not usable: {error}")
        return False
    return bool(state.get("key") == update.key)


def check_states(checkpoint: Path, config: RunConfig, iteration: int) -> None:
    """Raise `ConfigError` where a checkpoint lacks what an iteration after it goes on training."""
    for stage in taking_part(config, config.imitates(iteration)):
        if stage.makes == "state":
            check_state(checkpoint, stage.role)


def saved_state(run: RunDirectory, version: int, role: str = "update") -> Path | None:
    """The state of a role that trains, in the checkpoint that holds this policy version, STABLE or
    not; None for the initial model's.

    Raises `StateLost` when there is none: the missing iterations come first.
    """
    if version == INITIAL_VERSION:
        return None
    iteration = run.versions.maker(version)
    if iteration is None or not (
        iteration in run.stable_iterations() or is_updated(run, iteration, role)
    ):
        raise StateLost(
            f"policy version {version} is needed, but neither the learner nor a checkpoint "
            "holds it: resume the run, which repeats what is missing"
        )
    return check_state(run.checkpoint_path(iteration).resolve(), role)
