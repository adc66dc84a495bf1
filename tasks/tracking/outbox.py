"""What the flow wants MLflow to know and MLflow has not taken yet: bounded, never blocking."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.tracking.mlflow_client import Numbers


@dataclass(eq=False)
class Plan:
    """An iteration's deployment plan. switched: not the stage deployments of the one before."""

    iteration: int
    plan: Mapping[str, Any]
    switched: bool = True


@dataclass(eq=False)
class Chart:
    """The picture of the choices so far, drawn when it is sent."""

    iteration: int


@dataclass(eq=False)
class Checkpoint:
    """The newest whole checkpoint."""

    iteration: int
    path: Path


@dataclass(eq=False)
class Trace:
    """A played episode to show as a trace."""

    iteration: int
    example: Mapping[str, Any]
    seconds: float = field(default_factory=time.time)


Item = Numbers | Plan | Chart | Checkpoint | Trace


class Outbox:
    """Two bounded queues, oldest out first when full. Guarded by the tracker's lock.

    Numbers that fall out are found again in metrics.jsonl (`lost_numbers`); plans, checkpoints
    and episodes are not.
    """

    def __init__(self, numbers: int = 1024, others: int = 64) -> None:
        self._numbers: deque[Numbers] = deque(maxlen=numbers)
        self._others: deque[Item] = deque(maxlen=others)
        self.dropped = 0
        self.lost_numbers = False

    def __len__(self) -> int:
        return len(self._numbers) + len(self._others)

    def put(self, item: Item) -> None:
        """Add at the end; the oldest of its queue is dropped and counted when that is full."""
        if isinstance(item, Numbers):
            full = len(self._numbers) == self._numbers.maxlen
            self.lost_numbers |= full
            self._numbers.append(item)
        else:
            full = len(self._others) == self._others.maxlen
            self._others.append(item)
        self.dropped += full

    def head(self, metrics: int) -> list[Item]:
        """What to send next: as many steps as hold about `metrics` numbers, or one other item."""
        chosen: list[Item] = []
        for numbers in self._numbers:
            metrics -= len(numbers.metrics) + 1
            if chosen and metrics < 0:
                break
            chosen.append(numbers)
        return chosen or list(self._others)[:1]

    def remove(self, items: Sequence[Item]) -> None:
        """Take out what was sent or given up; what fell out meanwhile is no error."""
        gone = {id(item) for item in items}
        for queue in (self._numbers, self._others):
            kept = [item for item in queue if id(item) not in gone]
            queue.clear()
            queue.extend(kept)  # type: ignore[arg-type]

    def steps(self, kind: str) -> set[int]:
        """The steps of this kind that wait here."""
        return {numbers.step for numbers in self._numbers if numbers.kind == kind}
