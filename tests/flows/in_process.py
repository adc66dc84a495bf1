"""Runs a list of trainings one after another in this one process, their worker groups included.

A process of its own for each rank costs seconds of imports, which is all that most tests of what a
run directory promises would wait for. Everything else is real: flows, controller, workers' classes,
run directory, shards in shared memory, Prefect's server. A fault that raises ends a training as
Ctrl-C does; what a dead machine loses besides, `lose_memory` takes away.

`python -m tests.flows.in_process CONFIG STEPS.json`: each step is {"overrides", "fault",
"lose_memory", "go_back"}; writes why each ended (null: at its end) to STEPS.json's place.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import accelerate.utils.environment

from earl_core.cluster.errors import Raised, Where, WorkerCallFailed
from earl_core.cluster.host import MemoryUse
from earl_core.cluster.rank_process import WorkerContext
from earl_core.cluster.rpc import Json, Progress
from earl_core.config import load_config
from earl_core.run.recovery import go_back
from earl_core.system.import_path import load_object
from flows.train import train

accelerate.utils.environment.clear_environment = contextlib.nullcontext
"""It empties the environment of the whole process for a moment, also for the other workers here,
which may just read it."""

_building = threading.Lock()
"""One group at a time: modules that threads import side by side may be seen half made."""


class GroupHere:
    """A worker group of one rank that is a thread of this process, its event loop included."""

    def __init__(
        self,
        role: str,
        target: str,
        *,
        log_directory: Path,
        environment: Mapping[str, str] | None = None,
        **_: Any,
    ) -> None:
        self.role = role
        self.memory = [MemoryUse()]
        self.pids = [os.getpid()]
        self._target_name = target
        self._log = Path(log_directory) / f"{role}-0.log"
        self._environment = environment
        self._thread: ThreadPoolExecutor | None = None
        self._deployment: Json | None = None

    @property
    def alive(self) -> bool:
        return self._deployment is not None

    @property
    def deployment(self) -> Json | None:
        return self._deployment

    def start(
        self, deployment: Json, arguments: Json, world_size: int = 1, hosts: object = None
    ) -> None:
        assert world_size == 1, "ranks that talk to each other need processes of their own"
        self.stop()
        self._thread = ThreadPoolExecutor(1)
        self._context = WorkerContext(0, 1, self.role, self._log)
        if "target" in arguments:
            arguments = {**arguments, "assignments": [{"cores": [], "gpus": []}]}

        def build() -> None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
            with _building:
                target = load_object(self._target_name)
                self._target = target(self._context, deployment, **arguments)

        try:
            self._run("start", "", None, build)
        except BaseException:
            self.stop()
            raise
        self._deployment = deployment

    def call(
        self,
        method: str,
        *,
        stage: str,
        iteration: int,
        deadline_seconds: float,
        on_progress: Progress | None = None,
        abort: threading.Event | None = None,
        **arguments: Any,
    ) -> list[Any]:
        context = self._context
        context._send_progress = on_progress or (lambda _: None)

        def invoke() -> Any:
            context.stage, context.iteration = stage, iteration
            # As they would cross a wire.
            value = getattr(self._target, method)(**json.loads(json.dumps(arguments)))
            if inspect.isawaitable(value):
                value = self._loop.run_until_complete(_wait(value))
            return json.loads(json.dumps(value))

        return [self._run(method, stage, iteration, invoke)]

    def reshard(
        self, deployment: Json, *, stage: str, iteration: int, deadline_seconds: float
    ) -> list[Any]:
        where = {"stage": stage, "iteration": iteration, "deadline_seconds": deadline_seconds}
        results = self.call("reshard", deployment=deployment, **where)
        self._deployment = deployment
        return results

    def stop(self, grace_seconds: float = 10.0) -> None:
        thread, self._thread, self._deployment = self._thread, None, None
        if thread is not None:
            thread.submit(self._close).result()
            thread.shutdown()

    def _close(self) -> None:
        close = getattr(getattr(self, "_target", None), "close", None)
        value = close() if close else None
        if inspect.isawaitable(value):
            self._loop.run_until_complete(_wait(value))
        self._loop.close()

    def _run(
        self, method: str, stage: str, iteration: int | None, function: Callable[[], Any]
    ) -> Any:
        assert self._thread is not None
        try:
            return self._thread.submit(function).result()
        except Exception as error:
            where = Where(self.role, 0, method, stage, iteration, str(self._log))
            raise WorkerCallFailed(where, Raised.of(error)) from error


async def _wait(value: Any) -> Any:
    return await value


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
            asyncio.run(train(config=config, overrides=overrides))
            endings.append(None)
        except Exception as error:
            endings.append(f"{type(error).__name__}: {error}")
        if step.get("lose_memory"):
            shutil.rmtree(load_config(config, overrides).dispatch.directory, ignore_errors=True)
    return endings


if __name__ == "__main__":
    import torch

    import earl_core.control.worker_groups

    torch.set_num_threads(1)
    earl_core.control.worker_groups.WorkerGroup = GroupHere  # type: ignore[misc,assignment]
    # Threads that import torch and transformers side by side see them half made.
    earl_core.control.worker_groups.WorkerGroups.start_ahead = lambda self, wanted: None  # type: ignore[method-assign]
    config, place = sys.argv[1:]
    path = Path(place)
    path.write_text(json.dumps(run(config, json.loads(path.read_text()))))
