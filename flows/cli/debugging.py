"""`earl debug`: an iteration, or one stage of a run, in this process, where breakpoint() works."""

from __future__ import annotations

import atexit
import math
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from earl_core.config import ConfigError, RunConfig, load_config
from earl_core.config.load import recipe_names
from earl_core.config.selector import SelectorConfig
from earl_core.config.services import CheckpointConfig, ClusterConfig, ExperienceConfig
from earl_core.config.stages import RolloutStage, StagesConfig, UpdateStage
from earl_core.control.ancestor import beginning
from earl_core.deployment.stage_deployment import AXES
from earl_core.dispatch import read_manifest
from earl_core.dispatch.shards.manifest import sealed_path
from earl_core.run.checkpoints import stable_checkpoints
from earl_core.run.record import stored_config
from earl_core.run.rehearsal import rehearse
from earl_core.run.run_stores import run_store
from earl_core.system.errors import EarlError
from flows import server
from flows.cli.found_runs import find_run
from flows.cli.tables import make_console, rows_table

_FEW_PROMPTS = 2
_MEASURED = ("seconds", "bytes", "per_second", "load/", "mfu")
"""Parts of the names of metrics that tell of the machine and not of the data."""


def debug(
    name: str,
    stage: str | None,
    iteration: int | None,
    iterations: int,
    prompts: int | None,
    overrides: list[str],
    runs_directory: str,
) -> None:
    """Do iterations of a configuration, or of a run after its last checkpoint; or repeat a stage.
    Raises `ConfigError`, and what the stages raise."""
    console = make_console()
    run = _find(name, runs_directory, run_only=stage is not None or iteration is not None)
    # A run that it begins from lies in the usual runs directory.
    given = stored_config(run, overrides) if run else beginning(load_config(name, overrides))
    if stage is None:
        prompts = prompts or prompts_for_debugging(given)
    config, notes = for_one_process(given, prompts)
    if run is not None:
        iteration = _iteration(run, stage, iteration)
    first = iteration or 0
    most = max(config.iterations, first + iterations)
    config = config.model_copy(update={"iterations": most})
    with _temporary_run(config) as config:
        # Before prefect is imported; it keeps nothing in the home directory then.
        server.configure(config.runs_directory)
        target = Path(config.runs_directory) / config.name
        for note in notes:
            console.print(f"note: {note}")
        if run is not None:
            rehearse(run, given, first, target, config)
        console.print(f"in {target}, which is removed at the end", style="dim")
        if run is not None and stage is not None:
            _repeat(console, config, run, first, stage)
        else:
            _iterate(console, config, range(first, first + iterations))


def _find(name: str, runs_directory: str, run_only: bool) -> Path | None:
    """The run of this name; None where a configuration is meant."""
    if not run_only and (name in recipe_names() or Path(name).is_file()):
        return None
    try:
        return find_run(name, runs_directory)
    except ConfigError as error:
        if run_only:
            raise
        raise ConfigError(
            f"{name!r} is neither a recipe, nor a run file, nor a run: {error}"
        ) from None


def _iteration(run: Path, stage: str | None, iteration: int | None) -> int:
    """Return the iteration that is meant: by default the last one that was finished, or without a
    stage the one after it."""
    if iteration is not None:
        return iteration
    following = max(stable_checkpoints(run), default=-1) + 1
    if stage is None:
        return following
    done = (path.parent.name for path in run.glob(f"iterations/*/{stage}.json"))
    return max((int(number) for number in done if number.isdigit()), default=0)


def prompts_for_debugging(config: RunConfig) -> int:
    """Few, but one for each minibatch."""
    own = config.critic.minibatches if config.critic else None
    few = max(_FEW_PROMPTS, config.update.minibatches, own or 1)
    return min(few, config.rollout.prompts_per_iteration)


def for_one_process(config: RunConfig, prompts: int | None = None) -> tuple[RunConfig, list[str]]:
    """The configuration as far as it works in one process, and what was changed, for people.
    prompts: of an iteration; None as it is."""
    notes = []
    played = [each for each in (config.environment, *config.environments) if each is not None]
    if config.rollout.engine != "torch":
        notes.append(f"the torch engine plays, because {config.rollout.engine} has own processes")
    update = config.stages.update or UpdateStage()
    engine = config.stages.rollout or RolloutStage()
    alone = update.model_copy(update=dict.fromkeys((*AXES, "expert_parallel"), 1))
    ranks = config.experience.ranks * config.cluster.most * engine.replicas
    if ranks > 1 or alone != update or config.stages.changes:
        notes.append("every stage has one rank")
    if any(each.python for each in played) or config.reward.python:
        notes.append("what runs under another Python stays in processes of its own")
    rollout: dict[str, Any] = {"engine": "torch", "deal": "contiguous"}
    if prompts is not None:
        rollout["prompts_per_iteration"] = prompts
        notes.append(f"{prompts} prompts an iteration, {config.rollout.group_size} episodes each")
    schedule = config.schedule
    if prompts and schedule.replay is not None and not schedule.replay.groups(prompts):
        schedule = schedule.model_copy(update={"replay": None})
        notes.append("no group is trained again: schedule.replay.share of so few is less than one")
    patient = {"call_timeout_seconds": None, "episode_timeout_seconds": None}
    environment = config.environment and config.environment.model_copy(update=patient)
    untracked = {"enabled": False, "keep_episodes": "none"}
    changed = {
        "environment": environment,
        "environments": tuple(each.model_copy(update=patient) for each in config.environments),
        "rollout": config.rollout.model_copy(update=rollout),
        "stages": StagesConfig(rollout=RolloutStage(), update=alone),
        "schedule": schedule,
        "selector": SelectorConfig(policy="fixed"),
        "cluster": ClusterConfig(),
        "experience": ExperienceConfig(),
        "evaluation": config.evaluation.model_copy(update={"every": 0}),
        "checkpoint": CheckpointConfig(every=10**6),
        "tracking": config.tracking.model_copy(update=untracked),
    }
    return config.model_copy(update=changed), notes


@contextmanager
def _temporary_run(config: RunConfig) -> Iterator[RunConfig]:
    directory = Path(tempfile.mkdtemp(prefix="earl-debug-"))
    # Prefect makes its home there anew as the process ends; what was registered first is last.
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    dispatch: dict[str, Any] = {"durability": "memory", "spill_url": None}
    # Another run's shards are its own, whatever their age.
    dispatch |= {"retain_hours": 1e6, "retain_bytes": 2**62}
    place = {
        "runs_directory": str(directory / "runs"),
        "dispatch": config.dispatch.model_copy(update=dispatch),
    }
    try:
        yield config.model_copy(update=place)
    finally:
        # Nobody has finished a run that was not opened, and its copies would stay in shared memory.
        with suppress(OSError, EarlError):
            run_store(directory / "runs" / config.name, config).remove()
        shutil.rmtree(directory, ignore_errors=True)


def _listen(console: Console) -> Any:
    def heard(stage: str, iteration: int, event: dict[str, Any]) -> None:
        if event.get("stage_started"):
            console.print(f"iteration {iteration}: {stage}")
        elif "chosen" in event:
            console.print(event["chosen"])
        elif "repeated" in event or "building" in event:
            text = event.get("repeated") or f"building the model {event['building']}"
            console.print(f"  {text}")

    return heard


def _iterate(console: Console, config: RunConfig, numbers: range) -> None:
    from flows.debug import Debugged, opened_here

    with opened_here(config, _listen(console)) as controller:
        try:
            for number in numbers:
                started = time.perf_counter()
                manifests = Debugged(controller, number).whole()
                learnt = manifests["update"].metrics
                told = f"imitation loss {learnt.get('loss', math.nan):.3f}"
                if "reward" in manifests:
                    played = manifests["reward"].metrics
                    told = f"return {played.get('mean', math.nan):+.3f}"
                console.print(
                    f"iteration {number}: {told}, gradient "
                    f"norm {learnt.get('grad_norm', math.nan):.3g}, "
                    f"{time.perf_counter() - started:.1f} s"
                )
        finally:
            controller.run.finish()


def _repeat(console: Console, config: RunConfig, run: Path, iteration: int, stage: str) -> None:
    from flows.debug import REPEATABLE, Debugged, opened_here

    if stage not in REPEATABLE:
        raise ConfigError(f"--stage takes one of {', '.join(REPEATABLE)}, not {stage!r}")
    sealed = sealed_path(run, iteration, stage)
    if not sealed.is_file():
        raise ConfigError(
            f"iteration {iteration} of {run} has no finished {stage}: give another --iteration"
        )
    before = read_manifest(sealed).metrics
    with opened_here(config, _listen(console)) as controller:
        try:
            manifest, repeated = Debugged(controller, iteration).repeat(stage)
        finally:
            controller.run.finish()
    if repeated:
        console.print(
            f"The shards of {', '.join(repeated)} are gone from shared memory: those stages were "
            "repeated first."
        )
    console.print(rows_table(compare(before, manifest.metrics)))


def compare(before: Mapping[str, float], now: Mapping[str, float]) -> list[dict[str, str]]:
    """Rows of the metrics that both have and that tell of the data."""
    names = [name for name in before if name in now and not any(part in name for part in _MEASURED)]
    return [
        {
            "metric": name,
            "sealed": f"{before[name]:.8g}",
            "now": f"{now[name]:.8g}",
            "difference": "" if before[name] == now[name] else f"{now[name] - before[name]:+.2g}",
        }
        for name in names
    ]
