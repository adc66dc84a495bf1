"""Runs a list of trainings one after another in this one process, their worker groups included.

A process of its own for each rank costs seconds of imports, which is all that most tests of what a
run directory promises would wait for. Everything else is real: flows, controller, workers' classes,
run directory, shards in shared memory, Prefect's server. A fault that raises ends a training as
Ctrl-C does; what a dead machine loses besides, `lose_memory` takes away.

`python -m tests.flows.in_process CONFIG STEPS.json`: each step is {"overrides", "fault",
"lose_memory", "go_back", "alone", "fork", "plant", "decisions"}, where `alone` names a run whose
next iteration is scheduled by itself, `fork` a run, its checkpoint and the name of a fork of it,
`plant` a difference, and `decisions` those of the guard (`tests.flows.planting`); writes why each
ended (null: at its end) to STEPS.json's place.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import accelerate.utils.environment

from earl_core.cluster.in_process import InProcessGroup
from earl_core.config import load_config
from earl_core.control.fork_plan import ForkPlan
from earl_core.run.recovery import go_back
from flows.iteration import iteration
from flows.train import train
from tests.flows.planting import decided, planted

accelerate.utils.environment.clear_environment = contextlib.nullcontext
"""It empties the environment of the whole process for a moment, also for the other workers here,
which may just read it."""


def run(config: str, steps: list[dict[str, Any]]) -> list[str | None]:
    """Why each of the steps ended."""
    endings: list[str | None] = []
    for step in steps:
        overrides = step.get("overrides", [])
        os.environ["EARL_FAULT"] = step.get("fault", "")
        if "go_back" in step:
            settings = load_config(config, overrides)
            go_back(Path(settings.runs_directory) / settings.name, step["go_back"])
        try:
            with planted(step.get("plant", "")), decided(step.get("decisions", ())):
                _train(config, overrides, step)
            endings.append(None)
        except Exception as error:
            endings.append(f"{type(error).__name__}: {error}")
        if step.get("lose_memory"):
            shutil.rmtree(load_config(config, overrides).dispatch.directory, ignore_errors=True)
    return endings


def _train(config: str, overrides: list[str], step: dict[str, Any]) -> None:
    runs_directory = Path(load_config(config, []).runs_directory)
    if "fork" in step:
        parent, which, name = step["fork"]
        made = ForkPlan.of(runs_directory / parent, which, name, overrides).make()
        asyncio.run(train(config=str(made / "config.yaml"), overrides=[]))
    elif "alone" in step:
        directory = runs_directory / step["alone"]
        asyncio.run(iteration(str(directory)))
    else:
        asyncio.run(train(config=config, overrides=overrides))


if __name__ == "__main__":
    import torch

    import earl_core.control.worker_groups

    torch.set_num_threads(1)
    earl_core.control.worker_groups.WorkerGroup = InProcessGroup  # type: ignore[misc,assignment]
    # Threads that import torch and transformers side by side see them half made.
    earl_core.control.worker_groups.WorkerGroups.start_ahead = lambda self, wanted: None  # type: ignore[method-assign]
    config, place = sys.argv[1:]
    path = Path(place)
    path.write_text(json.dumps(run(config, json.loads(path.read_text()))))
