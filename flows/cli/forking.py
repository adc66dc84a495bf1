"""`earl fork`."""

from __future__ import annotations

from pathlib import Path

from earl_core.config import ConfigError, RunConfig
from earl_core.control.policy_player import PlayedPolicy, find_checkpoint
from earl_core.run.checkpoints import holding_checkpoint
from earl_core.run.fork import make_fork
from earl_core.run.inherited_stages import foreseen
from earl_core.run.record import config_of_run, given_in, settings_of, stored_config
from flows.cli.arguments import Show
from flows.cli.errors import shell_name
from flows.cli.found_runs import find_run
from flows.cli.tables import make_console
from flows.cli.training import go_on, preflight

_MODEL = ("path", "from", "builder", "builder_options", "adapter", "chat_template")


def fork(
    parent: tuple[str, str], name: str, overrides: list[str], show: Show, dry_run: bool
) -> None:
    """Make a fork and train it. parent: RUN[@N], and the directory in which runs are found by name,
    where the fork will be. dry_run: only say what it would take over."""
    path, found, before = _checkpoint(*parent)
    iteration = int(found.policy.parent.name)
    place = [f"name={name}", f"runs_directory={path.parent}"]
    settings = config_of_run(path, [*overrides, *place])
    _check(before, settings, iteration)
    target = path.parent / settings.name
    # What the parent began with lies in its own directory still.
    preflight(settings.model_copy(update={"name": before.name}), target)
    console = make_console(quiet=show in ("quiet", "json"))
    console.print(f"{settings.name} begins with {found.label} of {before.name}")
    for text in (*found.damaged, *foreseen(path, before, settings, iteration)):
        console.print(f"  {text}")
    if dry_run:
        return
    assert found.marker is not None, "only the initial model has none"
    with holding_checkpoint(found.marker):
        make_fork(path, iteration, settings)
    go_on(stored_config(target), target, [], show)


def _checkpoint(text: str, runs_directory: str) -> tuple[Path, PlayedPolicy, RunConfig]:
    """A run, its checkpoint that RUN[@N] names, and its settings."""
    run, _, which = text.rpartition("@")
    try:
        path = find_run(run or text, runs_directory)
    except ConfigError:
        # The name itself may have the sign in it.
        if not run:
            raise
        path, which = find_run(text, runs_directory), ""
    which = which if run else ""
    if which == "initial":
        raise ConfigError(
            "a fork begins with a checkpoint, and there is none before the first iteration: "
            f"`earl train {shell_name(path)}/config.yaml --name NEW` begins anew"
        )
    config = stored_config(path)
    return path, find_checkpoint(path, config, which or "last"), config


def _check(before: RunConfig, settings: RunConfig, iteration: int) -> None:
    """Raise `ConfigError` for a fork that is another model's, or has nothing to do."""
    old, new = given_in(settings_of(before), "model"), given_in(settings_of(settings), "model")
    for key in _MODEL:
        if old.get(key) != new.get(key):
            raise ConfigError(
                f"model.{key} differs from {before.name}'s, whose optimizer state a fork goes on "
                "with",
                remedy=f"leave it out, or begin a run with the weights alone: earl train CONFIG "
                f"--from {before.name}@{iteration}",
            )
    if settings.iterations <= iteration + 1:
        raise ConfigError(
            f"{before.name} has {settings.iterations} iterations, and nothing is left to do after "
            f"iteration {iteration}",
            remedy=f"give the fork more (--set iterations={iteration + 11}), or begin with an "
            "earlier checkpoint (RUN@N)",
        )
