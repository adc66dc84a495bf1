"""Held-out evaluation of a checkpoint, beside or after its training."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

from prefect import State, flow, task
from prefect.artifacts import acreate_table_artifact
from pydantic import Field

from earl_core.config import check_references
from earl_core.config.redaction import redaction_of
from earl_core.control.policy_player import PolicyPlayer, find_checkpoint
from earl_core.run.record import stored_config
from earl_core.secrets import guard_logging, shareable_tree
from earl_core.system.plural import plural
from flows.flow_names import evaluate_name
from flows.forms import AtLeastOne, Checkpoint, Overrides, RunPath, Unset, titled
from flows.running import HOOKS, heard, recorded
from tasks.report import artifact_name
from tasks.reports.suite_table import suite_rows


@task(name="play held-out games", persist_result=False)
def play_held_out(
    run: str, checkpoint: str, episodes: int | None, temperature: float | None, overrides: list[str]
) -> dict[str, Any]:
    """Play with the checkpoint in a worker of its own; outcomes with 95 % Wilson intervals."""
    guard_logging()
    path = Path(run)
    config = stored_config(path, overrides)
    check_references(config)
    redaction_of(config)
    found = find_checkpoint(path, config, checkpoint)
    settings = config.evaluation
    say = f"starting the rollout worker with {found.label}"
    heard("evaluation", found.version, {"say": say})
    with PolicyPlayer(config, found, heard) as player:
        result = player.evaluate(
            episodes or settings.episodes,
            settings.temperature if temperature is None else temperature,
        )
        suites = player.play_suites()
    return {
        "run": run,
        "checkpoint": found.label,
        "damaged": list(found.damaged),
        "policy_version": found.version,
        "episodes": result["episodes"],
        "failed": result["failed"],
        "outcomes": result["outcomes"],
        "suites": suites["suites"],
        "metrics": {**result["metrics"], **suites["metrics"]},
    }


@flow(name="evaluate", flow_run_name=evaluate_name, persist_result=False, **HOOKS)
async def evaluate(
    run: RunPath,
    checkpoint: Checkpoint = "last",
    episodes: Annotated[AtLeastOne | Unset, titled("Episodes")] = None,
    temperature: Annotated[
        Annotated[float, Field(title="A number", ge=0)] | Unset, titled("Temperature")
    ] = None,
    overrides: Overrides = [],  # noqa: B006  (Prefect copies parameters; a tuple has no form)
) -> dict[str, Any] | State[Any]:
    """Count the outcomes of held-out games with 95 % intervals, and play all suites of the run.

    The prompts and seeds are those of the evaluations inside `train`, so that equal numbers of
    episodes compare like with like. The run is not locked and may be training.

    Args:
        run: The directory of a run, as the host of the worker sees it.
        checkpoint: The iteration whose checkpoint plays; best is the one that was evaluated best,
            initial the model before training.
        episodes: Number of held-out episodes; by default that of the run's own evaluations.
        temperature: Sampling temperature; 0 takes the likeliest token. By default that of the
            run's own evaluations.
        overrides: Further settings, each as a.b=c; a secret as env:NAME or file:PATH.
    """
    path = Path(run)
    work = _evaluate(run, checkpoint, episodes, temperature, overrides)
    return await recorded(path.parent, work, label=path.resolve().name)


async def _evaluate(
    run: str, checkpoint: str, episodes: int | None, temperature: float | None, overrides: list[str]
) -> dict[str, Any]:
    future = play_held_out.submit(run, checkpoint, episodes, temperature, overrides)
    result: dict[str, Any] = await asyncio.to_thread(future.result)
    rows = [
        {"outcome": name, **{part: round(value, 4) for part, value in parts.items()}}
        for name, parts in result["outcomes"].items()
    ]
    name = artifact_name(Path(run).resolve().name)
    if result["suites"]:
        await acreate_table_artifact(
            shareable_tree(suite_rows(result["suites"])), key=f"{name}-suites"
        )
    await acreate_table_artifact(
        shareable_tree(rows),
        key=f"{name}-evaluation",
        description=" ".join(
            [
                *result["damaged"],
                f"{plural(result['episodes'], 'held-out game')} with {result['checkpoint']}",
            ]
        ),
    )
    return result
