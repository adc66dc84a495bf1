"""`earl plan RUNFILE`: what a run of it would lay out, where its stages are, and what moves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal

from earl_core.cluster.host import local_hosts
from earl_core.config import RunConfig
from earl_core.config.code import named_code
from earl_core.config.feasibility import check_stages
from earl_core.control.ancestor import beginning
from earl_core.control.device_figures import with_cores, with_figures
from earl_core.control.hardware import expected_hardware
from earl_core.control.precision import resolved
from earl_core.control.selector_policy import settled
from earl_core.control.shared_memory_need import version_bytes
from earl_core.control.stage_moves import Move, Reader, expected_manifests
from earl_core.control.stage_places import Seat, Site
from earl_core.control.teachers import find_teachers, reference_shapes
from earl_core.deployment.plan import DeploymentPlan
from earl_core.deployment.shapes import Hardware, ModelShape
from earl_core.deployment.stages import STAGES
from earl_core.dispatch import Manifest, read_manifest
from earl_core.learner.data.samples import RowCost
from earl_core.pretrained.model_directory import read_model_shape
from earl_core.run.record import stored_config
from earl_core.selector.choice.automatic import configured_layout, under_live_tokens
from earl_core.selector.choice.expected_load import loads
from earl_core.selector.choice.explain import plan_rows
from earl_core.selector.choice.policy import select
from earl_core.selector.choice.prediction import NoFeasiblePlan
from earl_core.selector.choice.selection import SelectionInput, Statistics
from earl_core.selector.model.devices import device_of
from earl_core.selector.model.roofline import Load
from earl_core.system.errors import ConfigError
from earl_core.system.hardware import HostResources
from earl_core.system.import_path import only_looks
from flows.cli.configurations import find_configuration
from flows.cli.plan_arguments import find_hardware, find_model, parse_contexts
from flows.cli.tables import make_console, rows_table

Row = dict[str, str]

_PLANNED_BY = ("stages.", "algorithm.")
"""Beginnings of keys whose code a plan asks."""


def explain_file(
    what: str,
    runs_directory: str,
    overrides: Sequence[str],
    place: str,
    explain: bool,
    as_json: bool,
    model: str | None = None,
    context: str | None = None,
) -> None:
    """Print the plan of the first iteration of a run file, a recipe or a run.

    place, model, context: as `explain_question` takes them; None: what the run file has. explain:
    also who is where, and what moves between the stages. Raises `ConfigError` for what `earl train`
    would refuse.
    """
    config = find_configuration(what, runs_directory, list(overrides))
    _check_code(config)
    told = explanation(config, place, model, context)
    if as_json:
        print(json.dumps(told.plain()))
        return
    console = make_console()
    console.print(rows_table(plan_rows(told.site.plan)))
    if explain:
        told.print(console)


def _check_code(config: RunConfig) -> None:
    """Raise `ConfigError` where a plan follows from code that may not be imported here."""
    needed = {key: code for key, code in named_code(config).items() if key.startswith(_PLANNED_BY)}
    if only_looks() and needed:
        shown = ", ".join(f"{key} ({code})" for key, code in needed.items())
        raise ConfigError(
            f"the plan follows from code that the run file names, which was not imported: {shown}",
            remedy="if you trust it, add --run-code",
        )


class Explanation:
    """Who is where, and what moves, in an iteration.

    load: that the plan assumes; None: the moves are of what was sealed.
    """

    def __init__(self, site: Site, moves: list[Move], load: Load | None) -> None:
        self.site, self.moves, self.load = site, moves, load
        self.seats: list[Seat] = site.seats()

    def plain(self) -> dict[str, Any]:
        """The same as JSON."""
        return {
            "plan": self.site.plan.model_dump(mode="json"),
            "load": self.load._asdict() if self.load else None,
            "places": [seat._asdict() for seat in self.seats],
            "moves": [{**move._asdict(), "by": move.ways} for move in self.moves],
        }

    def print(self, console: Console) -> None:
        """Print both as tables."""
        console.print("\nWho is where", style="bold")
        console.print(rows_table([_seat_row(seat) for seat in self.seats]))
        if not self.moves:
            console.print("\nNothing has moved: no stage that reads another is sealed.")
            return
        what = "What moves in an iteration" if self.load else "What has moved, by what is sealed"
        console.print(f"\n{what}", style="bold")
        console.print(rows_table([move_row(move) for move in self.moves]))
        assumed = ""
        if load := self.load:
            assumed = (
                f"Assumed: {load.episodes:,} episodes of {load.context:,.0f} tokens and "
                f"{load.turns:,.0f} turns; texts are not counted. "
            )
        console.print(
            f"{assumed}Each byte counts once for all ranks of a host. Mapped bytes are read where "
            "they lie, and are not copied.",
            style="dim",
        )


def _seat_row(seat: Seat) -> Row:
    threads = str(seat.threads) if seat.threads else ""
    row = {"stage": seat.stage, "who": seat.who, "host": seat.host}
    return {**row, "devices": seat.devices, "threads of a rank": threads}


def move_row(move: Move) -> Row:
    """A move as a line of a table."""
    times = f" ({move.reads} reads)" if move.reads > 1 else ""
    return {
        "to": move.to,
        "from": move.of,
        "what": _columns(move) + times,
        "mapped": decimal(move.here),
        "from other hosts": decimal(move.received) if move.received else "",
        "by": ", ".join(move.ways),
    }


_NAMED = 10


def _columns(move: Move) -> str:
    names = move.columns
    return ", ".join(names) if len(names) <= _NAMED else f"all {len(names)} columns"


def explanation(
    config: RunConfig, place: str, model: str | None, context: str | None
) -> Explanation:
    """Lay the first iteration of the run out. The arguments are as `explain_file` takes them."""
    begins = beginning(config)
    shape = find_model(model) if model else _shape(begins)
    teachers = () if model else reference_shapes(begins, find_teachers(begins))
    hardware = _hardware(begins, place)
    here = place == "here" and config.cluster.backend == "local"
    settings = (_settled if here else _by_figures)(begins, hardware, shape, teachers)
    check_stages(settings, shape, hardware)
    statistics = Statistics()
    if context:
        asked = tuple(float(each) for each in parse_contexts(context)[-1:])
        statistics = Statistics(context_mean=asked, context_max=asked)
    own = {"reference_models": teachers, "statistics": statistics}
    given = SelectionInput.of(settings, hardware, shape, **own)
    try:
        plan = select(given)
    except NoFeasiblePlan as error:
        raise ConfigError(str(error)) from error
    if here:
        hosts = local_hosts(config.cluster.most)
        names, resources = [host.name for host in hosts], [host.resources for host in hosts]
    else:
        names = [f"host-{number}" for number in range(hardware.hosts)]
        resources = [_resources(hardware)] * hardware.hosts
    version = given.rollout.value_bytes * given.model.trained_parameters
    if not model:
        version = version_bytes(settings)
    site, load = Site(settings, plan, names, resources), loads(given)[0]
    reader = Reader(settings, site, RowCost.of(given.model))
    moves = reader.moves(expected_manifests(reader, load))
    return Explanation(site, [*moves, reader.weights(version)], load)


def past_explanation(run: Path, given: SelectionInput, plan: DeploymentPlan) -> Explanation:
    """Who was where, and what moved, in an iteration of a run, by its sealed plan and those of its
    stages that are sealed. given: what the plan was chosen by. Raises `ConfigError`."""
    config = stored_config(run)
    _check_code(config)
    folder = run / "iterations" / f"{plan.iteration:06d}"
    files = {name: folder / f"{name}.json" for name in STAGES}
    sealed = {name: read_manifest(file) for name, file in files.items() if file.is_file()}
    site = Site(config, plan, *_hosts_of(sealed, given.hardware))
    reader = Reader(config, site, RowCost.of(given.model))
    moves = reader.moves(sealed, finished=sealed)
    if "publish" in sealed:
        moves.append(reader.weights(round(sealed["publish"].metrics["bytes"])))
    return Explanation(site, moves, None)


def _hosts_of(
    sealed: Mapping[str, Manifest], hardware: Hardware
) -> tuple[list[str], list[HostResources]]:
    """Names of hosts, those of shards first, and what each has."""
    here = sorted({entry.host for each in sealed.values() for entry in each.shards})
    most = range(max(hardware.hosts, len(here)))
    names = [*here, *(f"host-{n}" for n in most if f"host-{n}" not in here)][: len(most)]
    return names, [_resources(hardware)] * len(names)


def _shape(config: RunConfig) -> ModelShape:
    path = Path(config.initial_model.path)
    if (path / "config.json").is_file():
        return read_model_shape(path)
    raise ConfigError(
        f"the model {path} is not here yet, and a plan needs its shape",
        remedy="name a well-known one, or a directory, with --model, or train one iteration first",
    )


def _hardware(config: RunConfig, place: str) -> Hardware:
    if place != "here":
        return find_hardware(place)
    return with_cores(with_figures(expected_hardware(config)))


def _settled(
    config: RunConfig, hardware: Hardware, shape: ModelShape, teachers: tuple[ModelShape, ...]
) -> RunConfig:
    """The configuration with what `auto` is, as the start decides it."""
    run = Path(config.runs_directory) / config.name
    return settled(resolved(config, run=run).config, hardware, shape, teachers).config


def _by_figures(
    config: RunConfig, hardware: Hardware, shape: ModelShape, teachers: tuple[ModelShape, ...]
) -> RunConfig:
    """The configuration with what `auto` is on hardware that is known by its figures alone."""
    fast = device_of(hardware).bf16_factor <= 1
    training, dtype = ("bf16", "bfloat16") if fast else ("fp32", "float32")
    if config.rollout.dtype == "auto":
        rollout = config.rollout.model_copy(update={"dtype": dtype})
        config = config.model_copy(update={"rollout": rollout})
    if config.update.precision == "auto":
        update = config.update.model_copy(update={"precision": training})
        config = config.model_copy(update={"update": update})
    if config.selector.policy != "auto":
        return config
    selector = under_live_tokens(config)
    if configured_layout(config, hardware):
        selector = config.selector.model_copy(update={"policy": "fixed"})
    return config.model_copy(update={"selector": selector})


def _resources(hardware: Hardware) -> HostResources:
    gpus = hardware.devices_per_host if hardware.gpus else 0
    return HostResources(cores=tuple(range(hardware.cpu_cores)), gpus=gpus)
