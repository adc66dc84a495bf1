"""Measure what the selector chooses by: throughput and memory of candidates under growing loads."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from prefect import State, flow
from prefect.artifacts import acreate_table_artifact
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import Field

from earl_core.config import RunConfig, check_references
from earl_core.selector.profile.profile_table import table_path
from earl_core.selector.profile_planner import Point
from flows.flow_names import profile_name
from flows.forms import Config, Overrides, Unset, titled
from flows.running import HOOKS, configured, heard, recorded
from tasks.measure import Profiler, describe, measure, open_profiler
from tasks.reports.plan_report import markdown_table
from tasks.reports.profile_report import report
from tasks.tracking.profile_run import track


def _say(text: str) -> None:
    heard("profile", 0, {"say": text})


@flow(
    name="profile",
    flow_run_name=profile_name,
    task_runner=ThreadPoolTaskRunner(max_workers=1),  # type: ignore[arg-type]
    persist_result=False,
    **HOOKS,
)
async def profile(
    config: Config = "tictactoe_tiny",
    minutes: Annotated[float, Field(gt=0), titled("Minutes")] = 20.0,
    context: Annotated[
        Annotated[int, Field(title="A number of tokens", ge=8)] | Unset, titled("Longest context")
    ] = None,
    overrides: Overrides = [],  # noqa: B006  (Prefect copies parameters; a tuple has no form)
) -> dict[str, Any] | State[Any]:
    """Measure the stage deployments that matter most to the selector, for some minutes.

    A profile that was stopped goes on where it ended; a finished one says so at once. No run is
    read, locked or changed.

    Args:
        config: A recipe, or the path of a run file, as the host of the worker sees it.
        minutes: Time limit in minutes, which all starts of the same profile share.
        context: Longest context to measure, in tokens; by default that of the model.
        overrides: Further settings, each as a.b=c; a secret as env:NAME or file:PATH.
    """
    settings = configured(config, overrides)
    if isinstance(settings, State):
        return settings
    work = _profile(settings, minutes, context)
    return await recorded(settings.runs_directory, work, label=settings.name)


async def _profile(settings: RunConfig, minutes: float, context: int | None) -> dict[str, Any]:
    check_references(settings)
    with open_profiler(settings, minutes, context) as profiler:
        await _measure_all(profiler)
    found = await asyncio.to_thread(report, profiler.given, profiler.table)
    if profiler.measured:
        text = _markdown(found)
        await asyncio.to_thread(track, settings, profiler.mark, found["metrics"], text)
    await acreate_table_artifact(
        found["measured"] or [{"measured": "nothing"}],
        key=f"profile-{profiler.mark}",
        description=f"{len(profiler.table.points)} measured loads, {profiler.table.seconds:.0f} s",
    )
    return {
        **found,
        "path": str(table_path(profiler.directory, profiler.mark)),
        "points": len(profiler.table.points),
        "new": profiler.measured,
        "seconds": profiler.table.seconds,
        "failures": profiler.failures,
    }


async def _measure_all(profiler: Profiler) -> None:
    known = len(profiler.table.points)
    if known:
        _say(f"going on after {known} points and {profiler.table.seconds:.0f} s")
    while (point := await asyncio.to_thread(profiler.next)) is not None:
        _say(f"measuring {describe(point)} ({profiler.seconds_left:.0f} s left)")
        named = measure.with_options(task_run_name=describe(point))
        future = named.submit(profiler.mark, _plain(point))
        found = await asyncio.to_thread(future.result)
        if found is not None:
            _say(_result(found))


def _plain(point: Point) -> dict[str, Any]:
    return {**point._asdict(), "candidate": point.candidate._asdict()}


def _result(found: dict[str, Any]) -> str:
    place = f"{found['key']}, {found['context']:.0f} x {found['requests']:.0f}"
    if found["out_of_memory"]:
        return f"{place}: out of memory"
    peak = found["peak_bytes"] / 2**30
    return f"{place}: {found['tokens_per_second']:,.0f} tokens/s, {peak:.2f} GiB"


def _markdown(found: dict[str, Any]) -> str:
    parts = []
    for title, key in (
        ("Measured", "measured"),
        ("What live_tokens would choose", "choices"),
        ("Held-out error of the memory model", "memory_errors"),
    ):
        parts += [f"## {title}", markdown_table(found[key])]
    return "\n\n".join(parts)
