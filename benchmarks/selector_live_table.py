"""Measurements of `benchmarks.selector_live`, made twice, interpolated to loads in between."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from earl_core.deployment.shapes import Hardware, ModelShape
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.selector.profile.profile_table import ProfilePoint, ProfileTable, key_of
from earl_core.system.files import write_atomic


class Cell(NamedTuple):
    """One layout under one load.

    engine: `torch` or `vllm`; empty for the update. requests: sequences offered to each engine, or
    samples of the update. a, b: tokens/s of one engine (all of the layout's engines at work), or of
    the whole update, one for each repetition; the two sets were taken in turns; empty where the
    memory ran out. peak: bytes of one engine or rank. alias: the layout cuts these samples as
    another one that was measured.
    """

    engine: str
    candidate: StageDeployment
    context: int
    requests: int
    a: tuple[float, ...]
    b: tuple[float, ...]
    peak: float = 0.0
    alias: bool = False

    @property
    def size(self) -> float:
        """Size that decides whether the cell fits: live tokens of an engine, tokens of a sample."""
        return float(self.context * (self.requests if self.engine else 1))


class Switch(NamedTuple):
    """Seconds to build a layout's worker groups, weights loaded, and to end them."""

    engine: str
    candidate: StageDeployment
    start: float
    stop: float


@dataclass
class LiveTable:
    """Everything that was measured. context_limit: of the engines. learner_start: seconds to start
    the update's worker group. reshards: seconds of each change of its layout while it lived."""

    model: ModelShape
    hardware: Hardware
    context_limit: int
    cells: list[Cell] = field(default_factory=list)
    switches: list[Switch] = field(default_factory=list)
    learner_start: float = 0.0
    reshards: list[float] = field(default_factory=list)

    def engines(self) -> list[str]:
        """The engines that were measured, in their order."""
        return list(dict.fromkeys(cell.engine for cell in self.cells if cell.engine))

    def of(self, engine: str) -> list[Cell]:
        """List the cells that a run on this engine meets: the engine's and the update's."""
        return [cell for cell in self.cells if cell.engine in (engine, "")]

    def contexts(self, engine: str) -> list[int]:
        """Contexts at which both the engine and the update were measured, ascending."""
        rollout = {cell.context for cell in self.cells if cell.engine == engine}
        update = {cell.context for cell in self.cells if not cell.engine}
        return sorted(rollout & update)

    def write(self, path: Path) -> None:
        """Write the table as JSON, for `read`."""
        content = {
            "model": self.model.model_dump(),
            "hardware": self.hardware.model_dump(),
            "context_limit": self.context_limit,
            "cells": [cell._asdict() for cell in self.cells],
            "switches": [switch._asdict() for switch in self.switches],
            "learner_start": self.learner_start,
            "reshards": self.reshards,
        }
        write_atomic(path, (json.dumps(content, indent=1) + "\n").encode(), 0o644)

    @classmethod
    def read(cls, path: Path) -> LiveTable:
        """Read a table that `write` wrote."""
        content = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            ModelShape.model_validate(content["model"]),
            Hardware.model_validate(content["hardware"]),
            content["context_limit"],
            [_cell(row) for row in content["cells"]],
            [_switch(row) for row in content["switches"]],
            content["learner_start"],
            content["reshards"],
        )


def _cell(row: dict[str, Any]) -> Cell:
    sets = {name: tuple(row[name]) for name in ("a", "b")}
    return Cell(**row | {"candidate": StageDeployment(*row["candidate"])} | sets)


def _switch(row: dict[str, Any]) -> Switch:
    return Switch(**row | {"candidate": StageDeployment(*row["candidate"])})


Measured = tuple[tuple[float, ...], tuple[float, ...], float]
"""Set A, set B, and the greatest peak; both sets empty where the memory ran out."""

Work = Callable[[], tuple[float, float] | None]
"""A rate and a peak; None: the memory ran out."""


def in_turns(
    work: Mapping[StageDeployment, Work], repetitions: int, until: float = math.inf
) -> dict[StageDeployment, Measured]:
    """Both sets of each layout.

    Layouts follow one another within a repetition, sets from one repetition to the next; the order
    turns round, so that no layout always comes after the same one. until: by `time.monotonic`, when
    no further repetition begins; the first is always made.
    """
    sets: dict[StageDeployment, tuple[list[float], list[float]]] = {
        layout: ([], []) for layout in work
    }
    peaks = dict.fromkeys(work, 0.0)
    left = list(work)
    for turn in range(2 * repetitions):
        if turn and turn % 2 == 0 and time.monotonic() > until:
            break
        for layout in left if turn // 2 % 2 == 0 else left[::-1]:
            found = work[layout]()
            if found is None:
                left = [other for other in left if other != layout]
                sets[layout] = [], []
                continue
            sets[layout][turn % 2].append(found[0])
            peaks[layout] = max(peaks[layout], found[1])
    return {k: (tuple(a), tuple(b), peaks[k]) for k, (a, b) in sets.items()}


def update_cells(
    layouts: Iterable[StageDeployment],
    context: int,
    samples: int,
    work: Callable[[StageDeployment], tuple[float, float] | None],
    repetitions: int,
    until: float = math.inf,
) -> list[Cell]:
    """The update's cells; layouts that cut the samples alike are measured once."""
    first: dict[StageDeployment, StageDeployment] = {}
    same = {}
    for layout in layouts:
        cut = layout._replace(max_tokens_per_microbatch=together(layout, context, samples))
        same[layout] = first.setdefault(cut, layout)
    measured = {layout: partial(work, layout) for layout in first.values()}
    found = in_turns(measured, repetitions, until)
    return [
        Cell("", layout, context, samples, *found[other], alias=other != layout)
        for layout, other in same.items()
    ]


def together(layout: StageDeployment, context: int, samples: int) -> int:
    """Samples of a microbatch: budgets that come to the same are one."""
    return min(samples, max(1, layout.max_tokens_per_microbatch // context))


Pick = Callable[[Cell], float]


def from_a(cell: Cell) -> float:
    """Return the value that a policy may see."""
    return statistics.median(cell.a)


def from_b(cell: Cell) -> float:
    """Return the value that policies are judged by."""
    return statistics.median(cell.b)


class Surface:
    """Tokens/s of one layout, its logarithm linear in octaves of context and of requests between
    what was measured, and level beyond."""

    def __init__(self, rates: Mapping[tuple[int, int], float]) -> None:
        lines: dict[int, list[tuple[float, float]]] = {}
        for (context, requests), rate in sorted(rates.items()):
            lines.setdefault(context, []).append((math.log2(requests), math.log(rate)))
        self._lines = [(math.log2(context), line) for context, line in sorted(lines.items())]

    def __call__(self, context: float, requests: float) -> float:
        wide = math.log2(requests)
        points = [(place, _between(wide, line)) for place, line in self._lines]
        return math.exp(_between(math.log2(context), points))


def _between(at: float, points: Sequence[tuple[float, float]]) -> float:
    """Linear between the points, which ascend; level outside."""
    for (low, below), (high, above) in itertools.pairwise(points):
        if at <= high:
            share = max(0.0, at - low) / (high - low)
            return below + share * (above - below)
    return points[-1][1] if at > points[0][0] else points[0][1]


class Truth:
    """Seconds of the stages of a run on one engine by one of the two sets."""

    def __init__(self, table: LiveTable, engine: str, pick: Pick) -> None:
        rates: dict[StageDeployment, dict[tuple[int, int], float]] = {}
        fits: dict[StageDeployment, list[float]] = {}
        fails: dict[StageDeployment, list[float]] = {}
        for cell in table.of(engine):
            (fits if cell.a else fails).setdefault(cell.candidate, []).append(cell.size)
            if cell.a:
                rates.setdefault(cell.candidate, {})[cell.context, cell.requests] = pick(cell)
        # Between the greatest that fitted and the least that did not, the limit is halfway in
        # octaves.
        self._limits = {
            c: math.sqrt(min(sizes) * max([s for s in fits.get(c, ()) if s < min(sizes)] or [1.0]))
            for c, sizes in fails.items()
        }
        self._surfaces = {candidate: Surface(found) for candidate, found in rates.items()}
        self._peaks = {
            c: Surface(
                {
                    (x.context, x.requests): x.peak
                    for x in table.of(engine)
                    if x.candidate == c and x.peak > 0
                }
            )
            for c in rates
            if any(x.peak > 0 for x in table.of(engine) if x.candidate == c)
        }
        self._budgets = sorted({c.max_tokens_per_microbatch for c in rates if c.stage == "update"})

    def layouts(self, stage: str) -> list[StageDeployment]:
        """List the stage's layouts that were measured."""
        return sorted(c for c in self._surfaces if c.stage == stage)

    def rate(self, candidate: StageDeployment, context: float, episodes: int) -> float:
        """Tokens/s of one engine, or of the whole update. Raises `KeyError` for a layout that was
        not measured."""
        surface = self._surfaces[self._measured(candidate, context)]
        return surface(context, offered(candidate, episodes))

    def seconds(self, candidate: StageDeployment, context: float, episodes: int) -> float:
        """Return the seconds of the stage in one iteration, in which each episode has `context`
        tokens; infinite where the memory runs out."""
        size = context * (offered(candidate, episodes) if candidate.stage == "rollout" else 1)
        if size >= self._limits.get(self._measured(candidate, context), math.inf):
            return math.inf
        share = episodes / candidate.replicas if candidate.stage == "rollout" else episodes
        return share * context / self.rate(candidate, context, episodes)

    def peak(self, candidate: StageDeployment, context: float, episodes: int) -> float:
        """Bytes of one engine or rank; 0 when they were not measured."""
        surface = self._peaks.get(self._measured(candidate, context))
        return 0.0 if surface is None else surface(context, offered(candidate, episodes))

    def _measured(self, candidate: StageDeployment, context: float) -> StageDeployment:
        """The measured layout that does the same. Budgets that cut samples alike are one."""
        if candidate.stage == "rollout":
            return candidate._replace(max_running_requests=0)
        budget = candidate.max_tokens_per_microbatch
        if budget not in self._budgets:
            alike = [b for b in self._budgets if max(1, b // context) == max(1, budget // context)]
            nearest = min(self._budgets, key=lambda b: abs(math.log(b / budget)))
            budget = alike[0] if alike else nearest
        return candidate._replace(max_tokens_per_microbatch=budget)


def offered(candidate: StageDeployment, episodes: int) -> float:
    """Sequences that one engine runs at once, or samples of the update."""
    if candidate.stage != "rollout":
        return float(episodes)
    share = episodes / candidate.replicas
    return min(share, candidate.max_running_requests or share)


def profile_of(
    cells: Sequence[Cell], keep: Callable[[Cell], bool] = lambda cell: True
) -> ProfileTable:
    """Set A as the selector's profile."""
    points = [
        ProfilePoint(
            key=key_of(cell.candidate),
            context=float(cell.context),
            requests=float(cell.requests),
            tokens_per_second=from_a(cell) if cell.a else 0.0,
            peak_bytes=cell.peak,
            out_of_memory=not cell.a,
            weight=float(max(1, len(cell.a))),
        )
        for cell in cells
        if keep(cell)
    ]
    return ProfileTable(points=tuple(points))


def whole(table: LiveTable, engine: str) -> ProfileTable:
    """All of set A."""
    return profile_of(table.of(engine))


def every_other(table: LiveTable, engine: str) -> ProfileTable:
    """Set A at every other context."""
    kept = table.contexts(engine)[::2]
    return profile_of(table.of(engine), lambda cell: cell.context in kept)


def nothing(table: LiveTable, engine: str) -> ProfileTable:
    """No measurement at all."""
    return ProfileTable()
