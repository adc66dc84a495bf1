"""`earl plan`: what the selector chose, or would choose, and why. Needs no GPU and no run."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from earl_core.dispatch import read_manifest
from earl_core.selector import DeploymentPlan, Hardware, ModelShape, NothingFits, SelectionInput
from earl_core.selector.catalogue import DEVICES, MODELS, cluster, device_of
from earl_core.selector.explain import (
    Question,
    Row,
    ask,
    candidate_rows,
    considered,
    memory_rows,
    refused_rows,
    replay,
    summary,
)
from earl_core.selector.policy import choose
from flows.cli.errors import UsageProblem
from flows.cli.runs import find_run
from flows.cli.tables import make_console


@dataclass(frozen=True)
class PlanRequest:
    """The options of `earl plan` without a run. context: such as `32K` or `1K,8K,128K`."""

    model: str
    hardware: str
    context: str
    responses: int
    running: int
    reference: bool
    engine_share: float


def explain_run(run: str, runs_directory: str, explain: bool) -> None:
    """Print the choice of RUN@ITERATION, made again from its sealed input."""
    name, at, number = run.partition("@")
    if not (at and number.isdigit()):
        raise UsageProblem(f"{run!r} is not of the form RUN@ITERATION, such as demo@12")
    path, iteration = find_run(name, runs_directory), int(number)
    folder = path / "iterations" / f"{iteration:06d}"
    source, sealed = folder / "selection.input", folder / "select.json"
    if not source.is_file() or not sealed.is_file():
        known = sorted(int(p.parent.name) for p in path.glob("iterations/*/selection.input"))
        span = f"it has {known[0]} to {known[-1]}" if known else "it has none"
        raise UsageProblem(f"iteration {iteration} of {path} made no choice: {span}")
    try:
        given = SelectionInput.model_validate_json(source.read_bytes())
        plan = DeploymentPlan.model_validate(read_manifest(sealed).outputs["plan"])
    except (ValidationError, KeyError) as error:
        raise UsageProblem(
            f"the choice in {folder} was sealed by another version of earl: {error}"
        ) from error
    console = make_console()
    console.print(f"[bold]{path}[/bold], iteration {iteration}, policy {plan.policy}")
    again = replay(given, plan)
    _print_plan(plan, console)
    if explain:
        _print_considered(given, console)
    if again.agrees:
        console.print("Choosing again from the sealed input gives the same plan.")
    else:
        console.print("Choosing again gives another plan: this version of earl chooses anew:")
        _print_plan(again.again, console)


def explain_question(request: PlanRequest, explain: bool) -> None:
    """Print what would be run for a model, hardware and load."""
    shape, hardware = find_model(request.model), find_hardware(request.hardware)
    contexts = parse_contexts(request.context)
    too_long = [context for context in contexts if context > shape.max_positions]
    if too_long:
        raise UsageProblem(
            f"--context {too_long[0]} is longer than the model's position range of "
            f"{shape.max_positions:,}: ask for less"
        )
    console = make_console()
    device = device_of(hardware)
    count = f"{hardware.hosts} x {hardware.devices_per_host}" if hardware.gpus else hardware.devices
    console.print(
        f"[bold]{request.model}[/bold] ({shape.parameters / 1e9:.3g} B parameters) on {count} "
        f"{device.name}, {request.responses} responses an iteration, at most {request.running} "
        "in an engine"
    )
    inputs = [ask(shape, hardware, _question(request, context)) for context in contexts]
    try:
        if len(inputs) > 1:
            print_rows([summary(given) for given in inputs], console)
        else:
            choice = choose(inputs[0])
            _print_plan(choice.plan, console)
        if explain:
            for given in inputs:
                console.print(f"\n[bold]Context {given.statistics.context_mean[-1]:,.0f}[/bold]")
                _print_considered(given, console, reasons=len(inputs) > 1)
    except NothingFits as error:
        raise UsageProblem(str(error)) from error
    if explain:
        _print_figures(hardware, console)


def explain_memory(hardware: str) -> None:
    """Print what the memory formulas give for well-known shapes on one device."""
    device = device_of(find_hardware(hardware))
    console = make_console()
    console.print(
        f"One sample of 8,192 tokens; GiB on one {device.name} of {device.memory_bytes / 2**30:.0f}"
        " GiB; engines use 85 % of each device"
    )
    print_rows(memory_rows(MODELS, device), console)


def _question(request: PlanRequest, context: int) -> Question:
    return Question(
        context=context,
        responses=request.responses,
        running=request.running,
        reference=request.reference,
        engine_share=request.engine_share,
    )


def _print_plan(plan: DeploymentPlan, console: Console) -> None:
    rows = [{"stage": name, "why": plan.reasons.get(name, "")} for name in plan.stages]
    print_rows(rows, console)


def _print_considered(given: SelectionInput, console: Console, reasons: bool = False) -> None:
    choice = considered(given)
    if choice is None:
        console.print(f"The policy {given.selector.policy} weighs no other layouts of its own.")
        return
    if reasons:
        _print_plan(choice.plan, console)
    for stage in choice.predictions:
        offered = len(choice.predictions[stage])
        console.print(f"\n[bold]{stage}[/bold], {offered} candidates")
        print_rows(candidate_rows(choice, stage), console)
    refused = refused_rows(choice)
    if refused:
        console.print("\nNot offered")
        print_rows(refused, console)


def _print_figures(hardware: Hardware, console: Console) -> None:
    device = device_of(hardware)
    console.print(
        f"\nSeconds known from the roofline are guesses: right in their order more than in their "
        f"size. Figures: {device.flops / 1e12:,.1f} TFLOPS bf16, "
        f"{device.memory_bandwidth / 1e12:.2f} TB/s memory, {device.link_bandwidth / 1e9:.0f} GB/s "
        f"links, {hardware.network_bandwidth / 1e9:.0f} GB/s between hosts ({device.source}).",
        style="dim",
    )


def print_rows(rows: Sequence[Row], console: Console) -> None:
    """Rows with the same keys as a table."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        values = [row.get(column, "") for row in rows]
        numeric = all(re.match(r"^[-+]?[\d,.]*( [%KMGTi]*B?)?$", value) for value in values)
        table.add_column(column, justify="right" if numeric else "left", no_wrap=numeric)
    for row in rows:
        table.add_row(*(row.get(column, "") for column in columns))
    console.print(table)


def find_model(name: str) -> ModelShape:
    """A well-known shape by name, or that of a directory with a config.json."""
    known = MODELS.get(name.lower().rpartition("/")[2].removesuffix("-instruct"))
    if known is not None:
        return known
    file = Path(name)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise UsageProblem(
            f"--model {name!r} is neither a directory with a config.json nor one of "
            f"{', '.join(MODELS)}"
        )
    try:
        shape = ModelShape.from_config(json.loads(file.read_text(encoding="utf-8")))
        shape.sizes()
        return shape
    except ValueError as error:
        raise UsageProblem(f"{file} cannot be used: {error}") from error


def find_hardware(name: str) -> Hardware:
    """`here`, a device of the catalogue (one host with 8), or HOSTSxGPUSxDEVICE."""
    if name == "here":
        from tasks.hardware import read_hardware

        return read_hardware()
    found = re.fullmatch(r"(?:(\d+)x(\d+)x)?([a-z0-9-]+)", name.lower())
    device = None
    if found:
        device = next((key for key in DEVICES if found[3] in (key, key.split("-")[0])), None)
    if found is None or device is None or "0" in (found[1], found[2]):
        raise UsageProblem(
            f"--hardware {name!r} is not known: say `here`, one of {', '.join(DEVICES)}, or hosts "
            "x devices x name, such as 16x8xh100-80gb"
        )
    return cluster(device, int(found[1] or 1), int(found[2] or 8))


def parse_contexts(text: str) -> list[int]:
    """`1024`, `32K`, or several with commas between them."""
    values = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)\s*([kK]?)\s*", part)
        if not found or int(found[1]) == 0:
            raise UsageProblem(
                f"--context {text!r} is not a number of tokens, such as 32768, 32K or 1K,8K,128K"
            )
        values.append(int(found[1]) * (1024 if found[2] else 1))
    return values
