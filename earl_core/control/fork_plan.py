"""What a fork of a run would be: looked at before anything is written, then made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from earl_core.config import ConfigError, RunConfig
from earl_core.control.policy_player import PlayedPolicy, find_checkpoint
from earl_core.control.resume_point import check_states
from earl_core.run.checkpoints import holding_checkpoint
from earl_core.run.fork import make_fork
from earl_core.run.inherited_stages import foreseen
from earl_core.run.record import (
    RunDamaged,
    config_of_run,
    given_in,
    read_record,
    settings_of,
    stored_config,
)

_MODEL = ("path", "from", "builder", "builder_options", "adapter", "chat_template")
_PLACE = ("name", "runs_directory")


@dataclass(frozen=True)
class ForkPlan:
    """parent: a run directory. before, settings: its configuration and the fork's. begins: the
    checkpoint. told: sentences about what will be taken over and what is done again."""

    parent: Path
    before: RunConfig
    settings: RunConfig
    begins: PlayedPolicy
    told: tuple[str, ...]

    @classmethod
    def of(cls, parent: Path, which: str, name: str, overrides: Sequence[str] = ()) -> ForkPlan:
        """Plan a fork beside its parent.

        which: `last`, `best` or the number of an iteration whose checkpoint is there. overrides:
        `a.b=c` on the parent's settings. Raises `ConfigError`, `CheckpointError` for a damaged
        checkpoint, `RunDamaged` for a run of another format, or whose record is damaged or gone.
        """
        before = stored_config(parent)
        _check_record(parent)
        if given := next((each for each in overrides if each.split("=")[0] in _PLACE), None):
            raise ConfigError(
                f"{given} is no setting of a fork, which has the name {name} and lies beside its "
                "parent: leave it out"
            )
        if which == "initial":
            raise ConfigError(
                "a fork begins with a checkpoint, and before the first iteration there is none: "
                f"begin anew with the settings in {parent / 'config.yaml'}"
            )
        begins = find_checkpoint(parent, before, which, trained=True)
        beside = json.dumps(str(parent.parent), ensure_ascii=False)
        place = [f"name={name}", f"runs_directory={beside}"]
        settings = config_of_run(parent, [*overrides, *place])
        iteration = int(begins.policy.parent.name)
        _check(before, settings, iteration)
        check_states(begins.policy.parent, settings, iteration + 1)
        told = *begins.damaged, *foreseen(parent, before, settings, iteration)
        return cls(parent, before, settings, begins, told)

    def make(self) -> Path:
        """Make the fork; its run directory. Raises as `make_fork` does, and `ConfigError` where the
        checkpoint was removed meanwhile."""
        assert self.begins.marker is not None, "only the initial model has none"
        with holding_checkpoint(self.begins.marker):
            return make_fork(self.parent, int(self.begins.policy.parent.name), self.settings)


def _check_record(parent: Path) -> None:
    """Raise `RunDamaged` for a run whose record is gone or is not what was written."""
    try:
        read_record(parent)
    except FileNotFoundError:
        raise RunDamaged(f"{parent} has no run.json: put it back") from None


def _check(before: RunConfig, settings: RunConfig, iteration: int) -> None:
    """Raise `ConfigError` for a fork of another model, or with nothing to do, or that exists."""
    old, new = given_in(settings_of(before), "model"), given_in(settings_of(settings), "model")
    for key in _MODEL:
        if old.get(key) != new.get(key):
            raise ConfigError(
                f"model.{key} differs from that of {before.name}, whose optimizer state a fork "
                "goes on with",
                remedy="leave it out, or begin a run with the weights alone: earl train CONFIG "
                f"--from {before.name}@{iteration}",
            )
    if settings.iterations <= iteration + 1:
        raise ConfigError(
            f"after iteration {iteration} nothing is left to do: iterations is "
            f"{settings.iterations}",
            remedy=f"give the fork more (--set iterations={iteration + 11}), or begin with an "
            "earlier checkpoint (RUN@N)",
        )
    target = Path(settings.runs_directory) / settings.name
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} exists already: choose another name for the fork")
