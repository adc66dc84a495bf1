"""The measuring of `benchmarks.selector_live`: real worker groups, layouts and sets in turns."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from benchmarks.selector_live_table import Cell, LiveTable, Switch, in_turns, update_cells
from earl_core.cluster.worker_group import WorkerGroup
from earl_core.config import parse_config
from earl_core.control.hardware import read_hardware
from earl_core.control.worker_groups import TARGETS
from earl_core.deployment.placement import find_placement
from earl_core.deployment.stage_deployment import CHECKPOINTING, StageDeployment
from earl_core.dispatch.segments.pool_directory import new_uid
from earl_core.models.tiny import character_tokenizer
from earl_core.pretrained.model_directory import read_model_shape
from earl_core.run.record import write_record
from earl_core.selector.profile_planner import generated_tokens
from earl_core.system.hardware import HostResources
from tools.shapes import Shape

VOCABULARY = 2048
_DEADLINE = 600.0
_GRACE_SECONDS = 30.0


@dataclass(frozen=True)
class Sizes:
    """Sizes to measure. requests: of an iteration, shared by a layout's engines. loads: context and
    samples of each update."""

    rollout_contexts: dict[str, tuple[int, ...]]
    requests: tuple[int, ...]
    loads: tuple[tuple[int, tuple[int, ...]], ...]
    budgets: tuple[int, ...]
    repetitions: int

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(*(c for cs in self.rollout_contexts.values() for c in cs), self.loads[-1][0])


FULL = Sizes(
    rollout_contexts={"torch": (128, 512, 2048), "vllm": (128, 512, 2048, 4096)},
    requests=(4, 16, 32),
    loads=((128, (4, 16)), (512, (4, 16)), (2048, (4,)), (4096, (2,))),
    budgets=(128, 256, 512, 1024, 2048, 4096),
    repetitions=5,
)
QUICK = Sizes(
    rollout_contexts={"torch": (128, 512)},
    requests=(4, 16),
    loads=((128, (4, 16)), (512, (4,))),
    budgets=(256, 512),
    repetitions=2,
)

LAYOUTS = {
    "torch": (
        StageDeployment("rollout", 1, 1, threads=2),
        StageDeployment("rollout", 2, 1, threads=1),
    ),
    "vllm": (
        StageDeployment("rollout", 1, 1, threads=2),
        StageDeployment("rollout", 2, 1, threads=1),
        StageDeployment("rollout", 1, 2, threads=1),
    ),
}
"""Everything that two cores allow."""

Note = Callable[[str], None]


def save_model(directory: Path, positions: int) -> Path:
    """A small random Llama whose heads two tensor ranks can share."""
    torch.manual_seed(0)
    tokenizer = character_tokenizer("0123456789")
    config = Shape("live", "llama", 256, 768, 4, 4, 2, 64, VOCABULARY).config(positions)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, getattr(tokenizer, name))
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


class Bench:
    """Place of one benchmark's worker groups, and the model that they load."""

    def __init__(self, directory: Path, sizes: Sizes, note: Note) -> None:
        self.directory, self.sizes, self.note = directory, sizes, note
        self.limit = sizes.longest + 64
        self.model = save_model(directory / "model", self.limit)
        write_record(directory, {"uid": new_uid()})

    def start(
        self, name: str, role: str, deployment: dict[str, Any], engine: str, cores: Sequence[int]
    ) -> WorkerGroup:
        """A worker group of one rank, with the environment that a controller gives it."""
        threads = str(deployment["threads"])
        group = WorkerGroup(
            name,
            "earl_core.cluster.placed_rank:build",
            log_directory=self.directory / "logs",
            environment={
                "OMP_NUM_THREADS": threads,
                "MKL_NUM_THREADS": threads,
                "GOMP_SPINCOUNT": "3000",
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
            },
        )
        arguments = {
            "target": TARGETS[role],
            "assignments": [{"cores": list(cores), "gpus": []}],
            "gpus_of_host": 0,
            "arguments": {"config": self._config(engine), "run_directory": str(self.directory)},
        }
        group.start(deployment, arguments, 1)
        return group

    def _config(self, engine: str) -> dict[str, Any]:
        settings = {
            "name": "selector_live",
            "iterations": 1,
            "model": {"path": str(self.model)},
            "environment": {"name": "tic_tac_toe"},
            "rollout": {
                "engine": engine,
                "prompts_per_iteration": 1,
                "group_size": 2,
                "max_turns": 1,
                "vllm": {"kv_cache_gib": 1},
            },
            "update": {"precision": "bf16", "learning_rate": 1e-6},
            "dispatch": {"directory": str(self.directory / "shards")},
        }
        return parse_config(settings).model_dump(mode="json")


def measure(directory: Path, sizes: Sizes, note: Note, keep: Path | None = None) -> LiveTable:
    """Everything. note: told what is being measured. keep: where the table is written, the update
    first and after each engine."""
    bench = Bench(directory, sizes, note)
    table = LiveTable(read_model_shape(bench.model), read_hardware(), bench.limit)
    measure_update(bench, table)
    if keep:
        table.write(keep)
    for engine in sizes.rollout_contexts:
        if importlib.util.find_spec(engine) is None:
            note(f"{engine} is not installed: left out")
            continue
        measure_engine(bench, table, engine)
        if keep:
            table.write(keep)
    return table


class Engines:
    """The engines of one layout, each in a worker group of its own."""

    def __init__(self, bench: Bench, engine: str, layout: StageDeployment) -> None:
        self._bench, self._engine, self.layout = bench, engine, layout
        self._groups: list[WorkerGroup] = []
        self._threads = ThreadPoolExecutor(layout.replicas)

    def start(self) -> float:
        """Seconds until all of them have the weights."""
        began = time.perf_counter()
        self._groups = list(self._threads.map(self._start, range(self.layout.replicas)))
        return time.perf_counter() - began

    def _start(self, member: int) -> WorkerGroup:
        layout, bench = self.layout, self._bench
        site = HostResources(tuple(sorted(os.sched_getaffinity(0))))
        place = find_placement("colocated").place(layout, member, site)
        deployment = layout._replace(
            replicas=1, max_running_requests=max(bench.sizes.requests), max_model_len=bench.limit
        )
        name = f"rollout-{self._engine}-{layout.replicas}x{layout.tensor_parallel}-{member}"
        group = bench.start(name, "rollout", deployment._asdict(), self._engine, place.cores)
        weights = {"directory": str(bench.model), "policy_version": 0}
        call(group, "rollout", "ensure", weights=weights)
        return group

    def measure(self, context: int, requests: int) -> tuple[float, float]:
        """Tokens/s of one engine while all are at work, and the greatest peak of one."""
        load = {
            "context": context,
            "requests": requests,
            "generated": generated_tokens(context),
            "seconds": 0.0,
        }
        found = list(
            self._threads.map(lambda group: call(group, "rollout", "measure", **load), self._groups)
        )
        rate = sum(each["tokens_per_second"] for each in found) / len(found)
        return rate, max(each["peak_bytes"] for each in found)

    def stop(self) -> float:
        """Seconds until all of them have ended."""
        began = time.perf_counter()
        list(self._threads.map(lambda group: group.stop(_GRACE_SECONDS), self._groups))
        self._groups = []
        return time.perf_counter() - began


def call(group: WorkerGroup, stage: str, method: str, **arguments: Any) -> dict[str, Any]:
    """A method of the group's only rank."""
    return dict(
        group.call(method, stage=stage, iteration=0, deadline_seconds=_DEADLINE, **arguments)[0]
    )


def measure_engine(bench: Bench, table: LiveTable, engine: str) -> None:
    """All layouts of one engine, alive at the same time, cell by cell in turns."""
    sizes = bench.sizes
    made = [Engines(bench, engine, layout) for layout in LAYOUTS[engine]]
    with ExitStack() as stack:
        started = {}
        for engines in made:
            stack.callback(engines.stop)
            started[engines.layout] = engines.start()
            bench.note(f"{engine} {engines.layout.label}: {started[engines.layout]:.1f} s to start")
        for context in sizes.rollout_contexts[engine]:
            for count in sizes.requests:
                table.cells += _rollout_cells(bench, engine, made, context, count)
        for engines in made:
            taken = started[engines.layout]
            table.switches.append(Switch(engine, engines.layout, taken, engines.stop()))


def _rollout_cells(
    bench: Bench, engine: str, made: Sequence[Engines], context: int, count: int
) -> list[Cell]:
    shares = {engines.layout: max(1, count // engines.layout.replicas) for engines in made}
    for engines in made:
        engines.measure(context, shares[engines.layout])
    found = in_turns(
        {e.layout: lambda e=e: e.measure(context, shares[e.layout]) for e in made},
        bench.sizes.repetitions,
    )
    cells = [
        Cell(engine, layout, context, shares[layout], a, b, peak)
        for layout, (a, b, peak) in found.items()
    ]
    bench.note(_line(f"{engine} {context} x {count}", cells))
    return cells


def measure_update(bench: Bench, table: LiveTable) -> None:
    """Every way of cutting the samples, with and without checkpointing, in one learner that is
    laid out anew for each measurement."""
    sizes = bench.sizes
    threads = len(os.sched_getaffinity(0))
    layouts = [
        StageDeployment(
            "update",
            threads=threads,
            max_tokens_per_microbatch=budget,
            activation_checkpointing=checkpointing,
        )
        for budget in sizes.budgets
        for checkpointing in CHECKPOINTING
    ]
    began = time.perf_counter()
    group = bench.start("update", "update", layouts[0]._asdict(), "torch", ())
    table.learner_start = time.perf_counter() - began
    learner = Learner(group, table)
    try:
        for context, counts in sizes.loads:
            for samples in counts:
                step = partial(learner.step, context=context, samples=samples)
                cells = update_cells(layouts, context, samples, step, sizes.repetitions)
                table.cells += cells
                own = [cell for cell in cells if not cell.alias]
                bench.note(_line(f"update {context} x {samples}", own))
    finally:
        group.stop(_GRACE_SECONDS)


class Learner:
    """The live learner, laid out anew before an update where that is needed."""

    def __init__(self, group: WorkerGroup, table: LiveTable) -> None:
        self._group, self._table = group, table

    def step(self, layout: StageDeployment, context: int, samples: int) -> tuple[float, float]:
        """Tokens/s of one update, and its peak."""
        wanted = layout._asdict()
        if self._group.deployment != wanted:
            began = time.perf_counter()
            self._group.reshard(wanted, stage="update", iteration=0, deadline_seconds=_DEADLINE)
            self._table.reshards.append(time.perf_counter() - began)
        found = call(self._group, "update", "measure", context=context, samples=samples)
        return found["tokens_per_second"], found["peak_bytes"]


def _line(where: str, cells: Sequence[Cell]) -> str:
    shown = (f"{cell.candidate.label} {min(cell.a):,.0f}-{max(cell.a):,.0f}" for cell in cells)
    return f"{where}: {'; '.join(shown)} tokens/s"
