"""`earl plan`: what the selector chose, or would choose, and why. Needs no GPU and no run."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from rich.text import Text

from earl_core.config.services import DispatchConfig
from earl_core.control.shared_memory_need import samples_bytes
from earl_core.deployment.plan import DeploymentPlan
from earl_core.deployment.shapes import AdapterShape, Hardware, ModelShape
from earl_core.dispatch import read_manifest
from earl_core.run.record import read_lines
from earl_core.selector.choice.changes import infeasible_text
from earl_core.selector.choice.expected_load import GENERATED_SHARE
from earl_core.selector.choice.explain import (
    PlannedLoad,
    ask,
    figures_text,
    memory_rows,
    outcome_rows,
    plan_rows,
    summary,
)
from earl_core.selector.choice.policy import select
from earl_core.selector.choice.prediction import NoFeasiblePlan
from earl_core.selector.choice.selection import SelectionInput
from earl_core.selector.model.catalogue import MODELS
from earl_core.selector.model.devices import device_of
from earl_core.selector.model.memory_model import gib
from earl_core.selector.profile.observations import INFEASIBLE, Observation
from earl_core.system.errors import ConfigError
from earl_core.system.plural import plural
from earl_core.system.shared_memory import VERSIONS, Need, enlarge, room_in
from flows.cli.found_runs import find_run
from flows.cli.plan_arguments import find_hardware, find_model, parse_contexts
from flows.cli.plan_file import past_explanation
from flows.cli.tables import make_console, rows_table
from tasks.reports.plan_report import candidate_tables


def explain_run(run: str, runs_directory: str, explain: bool, as_json: bool = False) -> None:
    """Print the choices of RUN@ITERATION, made again from their sealed inputs.

    explain: all attempts of the iteration with all candidates, what each infeasible stage
    taught, and what was predicted beside what was measured.
    """
    name, at, number = run.partition("@")
    if not (at and number.isdecimal()):
        raise ConfigError(f"{run!r} is not of the form RUN@ITERATION, such as demo@12")
    path, iteration = find_run(name, runs_directory), int(number)
    folder = path / "iterations" / f"{iteration:06d}"
    inputs = _sealed_inputs(path, folder, iteration)
    seen = _observations(path, iteration)
    plan = _sealed_plan(folder)
    if as_json:
        print(json.dumps(plan.model_dump(mode="json") if plan else None))
        return
    console = make_console()
    policy = plan.policy if plan else inputs[-1].selector.policy
    console.print(Text.assemble((str(path), "bold"), f", iteration {iteration}, policy {policy}"))
    for attempt, given in enumerate(inputs[:-1] if explain else ()):
        console.print(f"\nAttempt {attempt + 1} of {len(inputs)}", style="bold")
        _print_attempt(given, seen, console)
    if len(inputs) > 1:
        console.print(f"\nAttempt {len(inputs)} of {len(inputs)}", style="bold")
    if plan is None:
        console.print("No plan was sealed: the run ended, or is still choosing.")
        _print_attempt(inputs[-1], seen, console)
        return
    _print_plan(plan, console)
    if explain:
        _print_considered(inputs[-1], plan, console)
        if rows := outcome_rows(inputs[-1], plan, seen):
            console.print("\nPredicted and measured", style="bold")
            console.print(rows_table(rows))
        try:
            past_explanation(path, inputs[-1], plan).print(console)
        except ConfigError as error:
            console.print(f"\nWho is where is not told: {error}", style="yellow")
    _print_again(inputs[-1], plan, console)


def _sealed_inputs(path: Path, folder: Path, iteration: int) -> list[SelectionInput]:
    """The inputs of all attempts of an iteration, in their order."""
    earlier = [
        (int(number), file)
        for file in folder.glob("selection.*.input")
        if (number := file.name.split(".")[1]).isdigit()
    ]
    files = [file for _, file in sorted(earlier)]
    last = folder / "selection.input"
    files += [last] if last.is_file() else []
    if not files:
        known = sorted(int(p.parent.name) for p in path.glob("iterations/*/selection.input"))
        span = f"it has {known[0]} to {known[-1]}" if known else "it has none"
        raise ConfigError(f"iteration {iteration} of {path} made no choice: {span}")
    try:
        return [SelectionInput.model_validate_json(file.read_bytes()) for file in files]
    except ValidationError as error:
        raise ConfigError(
            f"the choice in {folder} was sealed by another version of earl: {error}"
        ) from error


def _observations(path: Path, iteration: int) -> list[Observation]:
    lines = read_lines(path / "selector.jsonl")
    return [Observation.model_validate(x) for x in lines if x.get("iteration") == iteration]


def _sealed_plan(folder: Path) -> DeploymentPlan | None:
    sealed = folder / "select.json"
    if not sealed.is_file():
        return None
    try:
        return DeploymentPlan.model_validate(read_manifest(sealed).outputs["plan"])
    except (ValidationError, KeyError) as error:
        raise ConfigError(
            f"the plan {sealed} was sealed by another version of earl: {error}"
        ) from error


def _print_attempt(given: SelectionInput, seen: Sequence[Observation], console: Console) -> None:
    """An attempt that no sealed plan stands for any more: its choice, and what it taught."""
    try:
        plan = select(given)
    except NoFeasiblePlan as error:
        console.print(f"No feasible plan: {error}")
        return
    _print_plan(plan, console)
    _print_considered(given, plan, console)
    for item in seen:
        own = plan.stages.get(item.stage) == item.deployment
        if own and item.kind in INFEASIBLE:
            console.print(infeasible_text(item), style="yellow")


def _print_again(given: SelectionInput, plan: DeploymentPlan, console: Console) -> None:
    try:
        again = select(given)
    except NoFeasiblePlan as error:
        console.print(f"Choosing again gives no plan: this version of earl finds that {error}")
        return
    if (again.stages, again.policy, again.division) == (plan.stages, plan.policy, plan.division):
        console.print("Choosing again from the sealed input gives the same plan.")
    else:
        console.print("Choosing again gives another plan: this version of earl chooses otherwise:")
        _print_plan(again, console)


_CONTEXT_ON_GPUS, _CONTEXT = "8K", "1K"
_PATIENCE = 3600.0
"""A model fits when an iteration is predicted to take at most so many seconds."""


def explain_question(
    model: str | None,
    place: str,
    context: str | None,
    explain: bool,
    as_json: bool,
    adapter: int | None = None,
    **load: Any,
) -> None:
    """Print what would be run for a model, on hardware by its name, and a load.

    model: None: the largest well-known one that fits. context: such as `32K` or `1K,8K,128K`; None:
    one that suits the hardware. adapter: the rank of the pairs that are trained beside all matrices
    of the layers, in place of the model. load: the other fields of `PlannedLoad`.
    """
    hardware = find_hardware(place)
    context = context or (_CONTEXT_ON_GPUS if hardware.gpus else _CONTEXT)
    loads = [PlannedLoad(tokens, **load) for tokens in parse_contexts(context)]
    longest = max(asked.context for asked in loads)
    pairs = AdapterShape(rank=adapter) if adapter else None
    if model:
        name, shape, why = model, find_model(model, pairs), ""
    else:
        name, shape, why = _fitting(hardware, loads, pairs)
    if longest > shape.max_positions:
        raise ConfigError(
            f"--context {longest} is longer than the model's position range of "
            f"{shape.max_positions:,}: ask for less"
        )
    console = make_console(quiet=as_json)
    size = f" ({shape.parameters / 1e9:.3g} B parameters) on {_devices(hardware)}"
    console.print(Text.assemble((name, "bold"), size))
    if pairs:
        console.print(_adapter(shape))
    if why:
        console.print(f"{why}: name another with --model.", style="dim")
    console.print(_assumed(loads), style="dim")
    inputs = [ask(shape, hardware, asked) for asked in loads]
    need = _need(shape, loads, inputs[0].rollout.value_bytes)
    console.print(_shared_memory(need, here=place == "here"))
    try:
        if as_json:
            plans = [_plain(name, asked, given) for asked, given in zip(loads, inputs, strict=True)]
            print(json.dumps(plans))
        elif len(inputs) > 1:
            console.print(rows_table([summary(given) for given in inputs]))
        else:
            _print_plan(select(inputs[0]), console)
        if explain:
            for given in inputs:
                mean = given.statistics.context_mean[-1]
                console.print(f"\nContext {mean:,.0f}", style="bold")
                plan = select(given)
                if len(inputs) > 1:
                    _print_plan(plan, console)
                _print_considered(given, plan, console)
    except NoFeasiblePlan as error:
        raise ConfigError(str(error)) from error
    if explain:
        _print_figures(hardware, console)


def _devices(hardware: Hardware) -> str:
    name = device_of(hardware).name
    if hardware.gpus:
        return f"{hardware.hosts} x {hardware.devices_per_host} {name}"
    return plural(hardware.devices, name)


def _need(shape: ModelShape, loads: Sequence[PlannedLoad], value: int) -> Need:
    """Return the need of shared memory, with a checkpoint every iteration, and the routing of a
    mixture recorded."""
    routing = shape.routing.stored_bytes if shape.routing is not None else 0
    return Need(
        value * shape.trained_parameters,
        max(samples_bytes(a.responses, a.context, int(a.reference), routing) for a in loads),
        VERSIONS + max(asked.staleness for asked in loads),
    )


def _shared_memory(need: Need, here: bool) -> Text:
    weights = f"{gib(need.weights)} for {need.counted} of the weights"
    text = Text(
        f"Shared memory of each host: {weights} and {gib(need.samples)} for an iteration's "
        f"samples, so {gib(need.size)} or more."
    )
    room = room_in(DispatchConfig().directory)
    if here and need.size > room.size:
        text.append(f" It is too small here, {room}: {enlarge(need.size)}.", style="yellow")
    return text


def _adapter(shape: ModelShape) -> str:
    """Say what is trained in place of the model."""
    rank = shape.adapter.rank if shape.adapter else 0
    return (
        f"Adapter of rank {rank} beside all matrices of the layers: "
        f"{shape.trained_parameters / 1e6:,.1f} M parameters are trained and published, and the "
        "model itself is frozen."
    )


def _state(shape: ModelShape, hardware: Hardware) -> str:
    """Say what decides on how many devices a model can be trained, whatever the load is."""
    size = 16 * shape.parameters / 1e9
    text = (
        f"Float32 weights, gradients and two Adam moments are 16 bytes x "
        f"{shape.parameters / 1e9:.3g} B parameters, {size:,.1f} GB, and so at least "
        f"{size / hardware.devices:,.1f} GB on each of {plural(hardware.devices, 'device')}."
    )
    if shape.experts > 1:
        text += (
            f" For a token {shape.active_parameters / 1e9:.3g} B of them work: "
            f"{shape.experts_per_token} of a layer's {shape.experts} experts. A rank that computes "
            f"a layer gathers all of them, {2 * shape.largest_layer() / 1e9:.2f} GB in bf16"
        )
        degree = math.gcd(shape.experts, hardware.devices_per_host)
        if degree > 1:
            share = 2 * shape.largest_layer(degree) / 1e9
            text += f", or with expert_parallel {degree} its share, {share:.2f} GB"
        text += "."
    if shape.states is not None:
        text += (
            f" {shape.states.layers} of {shape.layers} layers have a state in place of a cache: "
            f"{shape.states.sequence_bytes(2) / 2**20:.1f} MiB of a sequence, however long it is."
        )
    return text


def _plain(name: str, asked: PlannedLoad, given: SelectionInput) -> dict[str, Any]:
    return {
        "model": name,
        "assumed": {**asked._asdict(), "generated_share": GENERATED_SHARE, **_rank(given.model)},
        "shared_memory_bytes": _need(given.model, [asked], given.rollout.value_bytes).size,
        "hardware": given.hardware.model_dump(mode="json"),
        "plan": select(given).model_dump(mode="json"),
    }


def _rank(shape: ModelShape) -> dict[str, int]:
    return {"adapter": shape.adapter.rank} if shape.adapter else {}


def _fitting(
    hardware: Hardware, loads: Sequence[PlannedLoad], adapter: AdapterShape | None
) -> tuple[str, ModelShape, str]:
    """The largest well-known model with a plan for every load whose iterations end in time; else
    the one whose iterations are shortest; and why. Raises `ConfigError` where none has a plan."""
    longest = max(asked.context for asked in loads)
    inside = {
        name: shape.with_adapter(adapter)
        for name, shape in MODELS.items()
        if shape.max_positions >= longest and not (adapter and shape.experts > 1)
    }
    if not inside:
        raise ConfigError(
            f"no well-known model has positions for {longest:,} tokens: name one with --model, or "
            "give a shorter --context"
        )
    seconds: dict[str, float] = {}
    reason = ""
    for name in sorted(inside, key=lambda name: -inside[name].parameters):
        try:
            seconds[name] = max(_seconds(inside[name], hardware, asked) for asked in loads)
        except NoFeasiblePlan as error:
            reason = f"{name}: {error}"
            continue
        if seconds[name] <= _PATIENCE:
            text = "It is the largest well-known model that fits there, with iterations of at most"
            return name, inside[name], f"{text} an hour"
    if not seconds:
        raise ConfigError(f"no well-known model fits, not even {reason}")
    quickest = min(seconds, key=lambda name: seconds[name])
    text = "No well-known model that fits there has iterations of at most an hour; this one's are"
    return quickest, inside[quickest], f"{text} the shortest"


def _seconds(shape: ModelShape, hardware: Hardware, asked: PlannedLoad) -> float:
    plan = select(ask(shape, hardware, asked))
    return sum(predicted.seconds for predicted in plan.predictions.values())


def _assumed(loads: Sequence[PlannedLoad]) -> str:
    lengths = " or ".join(f"{asked.context:,}" for asked in loads)
    totals = " or ".join(f"{asked.context * asked.responses:,}" for asked in loads)
    return (
        f"Assumed: {plural(loads[0].responses, 'response')} an iteration of {lengths} tokens "
        f"each, {GENERATED_SHARE:.0%} of them written by the model, so {totals} tokens an "
        f"iteration; at most {plural(loads[0].running, 'sequence')} in an engine. Change it with "
        "--responses, --context and --running."
    )


def explain_memory(hardware: str, as_json: bool = False) -> None:
    """Print what the memory formulas give for well-known shapes on one device."""
    device = device_of(find_hardware(hardware))
    if as_json:
        print(json.dumps(memory_rows(MODELS, device)))
        return
    console = make_console()
    console.print(
        f"One sample of 8,192 tokens; GiB on one {device.name} of {device.memory_bytes / 2**30:.0f}"
        " GiB; engines use 85 % of each device"
    )
    console.print(rows_table(memory_rows(MODELS, device)))


def _print_plan(plan: DeploymentPlan, console: Console) -> None:
    rows = plan_rows(plan)
    console.print(rows_table([{k: v for k, v in row.items() if k != "why"} for row in rows]))
    for row in rows:
        console.print(Text.assemble((f"{row['stage']}: ", "bold"), row["why"]))


def _print_considered(given: SelectionInput, plan: DeploymentPlan, console: Console) -> None:
    tables = candidate_tables(given, plan)
    if given.model.adapter is None:
        console.print(f"\n{_state(given.model, given.hardware)}")
    if given.selector.policy != "live_tokens":
        console.print(
            f"\nThe policy {given.selector.policy} does not weigh these; what is predicted of them:"
        )
    for heading, rows in tables:
        console.print(f"\n{heading}", style="bold")
        console.print(rows_table(rows))


def _print_figures(hardware: Hardware, console: Console) -> None:
    device = device_of(hardware)
    console.print(
        f"\nSeconds known from the roofline are guesses: right in their order more than in their "
        f"size. Figures of one {device.name}: {figures_text(device)}, "
        f"{hardware.network_bandwidth / 1e9:.0f} GB/s between hosts ({device.source}).",
        style="dim",
    )
