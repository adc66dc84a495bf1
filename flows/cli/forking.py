"""`earl fork`."""

from __future__ import annotations

from pathlib import Path

from earl_core.config import ConfigError
from earl_core.control.fork_plan import ForkPlan
from earl_core.run.record import stored_config
from flows.cli.arguments import Show
from flows.cli.found_runs import find_run
from flows.cli.tables import make_console
from flows.cli.training import go_on, preflight


def fork(
    parent: tuple[str, str], name: str, overrides: list[str], show: Show, dry_run: bool
) -> None:
    """Make a fork and train it. parent: RUN[@N], and the directory in which runs are found by name.
    dry_run: only say what it would take over."""
    plan = ForkPlan.of(*_run_and_checkpoint(*parent), name, overrides)
    target = plan.parent.parent / plan.settings.name
    # What the parent began with lies in its own directory still.
    preflight(plan.settings.model_copy(update={"name": plan.before.name}), target)
    console = make_console(quiet=show in ("quiet", "json"))
    console.print(f"{plan.settings.name} begins with {plan.begins.label} of {plan.before.name}")
    for text in plan.told:
        console.print(f"  {text}")
    if not dry_run:
        go_on(stored_config(plan.make()), target, [], show)


def _run_and_checkpoint(text: str, runs_directory: str) -> tuple[Path, str]:
    """The run directory and the checkpoint that RUN[@N] names."""
    run, _, which = text.rpartition("@")
    if run:
        try:
            return find_run(run, runs_directory), which
        except ConfigError:
            # The sign may belong to a directory's name.
            if not (Path(text) / "config.yaml").is_file():
                raise
    return find_run(text, runs_directory), "last"
