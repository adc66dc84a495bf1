"""`earl plan` without a run: what the selector would choose, and why. Needs no GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from earl_core.config.services import DispatchConfig
from earl_core.control.shared_memory_need import samples_bytes
from earl_core.deployment.plan import DeploymentPlan
from earl_core.deployment.shapes import AdapterShape, Hardware, ModelShape
from earl_core.selector.choice.expected_load import GENERATED_SHARE
from earl_core.selector.choice.explain import (
    PlannedLoad,
    ask,
    figures_text,
    memory_rows,
    plan_rows,
    summary,
)
from earl_core.selector.choice.policy import select
from earl_core.selector.choice.prediction import NoFeasiblePlan
from earl_core.selector.choice.selection import SelectionInput
from earl_core.selector.model.catalogue import MODELS
from earl_core.selector.model.devices import device_of
from earl_core.selector.model.memory_model import gib
from earl_core.system.errors import ConfigError
from earl_core.system.plural import plural
from earl_core.system.shared_memory import VERSIONS, Need, enlarge, room_in
from flows.cli.plan_arguments import find_hardware, find_model, parse_contexts
from flows.cli.tables import make_console, rows_table
from tasks.reports.plan_report import candidate_tables

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
            print_plan(select(inputs[0]), console)
        if explain:
            for given in inputs:
                mean = given.statistics.context_mean[-1]
                console.print(f"\nContext {mean:,.0f}", style="bold")
                plan = select(given)
                if len(inputs) > 1:
                    print_plan(plan, console)
                print_considered(given, plan, console)
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


def print_plan(plan: DeploymentPlan, console: Console) -> None:
    """Print the stages of a plan, and why each is as it is."""
    rows = plan_rows(plan)
    console.print(rows_table([{k: v for k, v in row.items() if k != "why"} for row in rows]))
    for row in rows:
        console.print(Text.assemble((f"{row['stage']}: ", "bold"), row["why"]))


def print_considered(given: SelectionInput, plan: DeploymentPlan, console: Console) -> None:
    """Print all candidates beside those of the plan."""
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
