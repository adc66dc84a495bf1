"""`earl plan RUN@ITERATION`: what the selector chose in a run, made again, and why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console
from rich.text import Text

from earl_core.deployment.plan import DeploymentPlan
from earl_core.dispatch import read_manifest
from earl_core.run.record import read_lines
from earl_core.selector.choice.changes import infeasible_text
from earl_core.selector.choice.explain import outcome_rows
from earl_core.selector.choice.policy import select
from earl_core.selector.choice.prediction import NoFeasiblePlan
from earl_core.selector.choice.selection import SelectionInput
from earl_core.selector.profile.observations import INFEASIBLE, Observation
from earl_core.system.errors import ConfigError
from flows.cli.found_runs import find_run
from flows.cli.plan import print_considered, print_plan
from flows.cli.plan_file import past_explanation
from flows.cli.tables import make_console, rows_table


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
        plan = _print_attempt(inputs[-1], seen, console)
        if plan is not None and explain:
            _print_places(path, inputs[-1], plan, console)
        return
    print_plan(plan, console)
    if explain:
        print_considered(inputs[-1], plan, console)
        if rows := outcome_rows(inputs[-1], plan, seen):
            console.print("\nPredicted and measured", style="bold")
            console.print(rows_table(rows))
        _print_places(path, inputs[-1], plan, console)
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
        if known and iteration <= known[-1]:
            raise ConfigError(f"iteration {iteration} of {path} made no choice: name another")
        newest = f"{path}@{known[-1]}, the newest" if known else f"{path}, its first iteration"
        raise ConfigError(
            f"iteration {iteration} of {path} is not chosen yet: it will be when it begins, by "
            f"what those before it have measured; ask for {newest}"
        )
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


def _print_places(
    path: Path, given: SelectionInput, plan: DeploymentPlan, console: Console
) -> None:
    try:
        past_explanation(path, given, plan).print(console)
    except ConfigError as error:
        console.print(f"\nWho is where is not told: {error}", style="yellow")


def _print_attempt(
    given: SelectionInput, seen: Sequence[Observation], console: Console
) -> DeploymentPlan | None:
    """An attempt that no sealed plan stands for: its choice, which is returned, and what it
    taught."""
    try:
        plan = select(given)
    except NoFeasiblePlan as error:
        console.print(f"No feasible plan: {error}")
        return None
    print_plan(plan, console)
    print_considered(given, plan, console)
    for item in seen:
        own = plan.stages.get(item.stage) == item.deployment
        if own and item.kind in INFEASIBLE:
            console.print(infeasible_text(item), style="yellow")
    return plan


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
        print_plan(again, console)
