"""Simulated engines and schedules, which `history` and `schedule_model` share.

An engine decodes many sequences at a time: alone one takes its `seconds`, and each that runs beside
slows all down by the share `slowdown`. A schedule says which rollout, group or update waits for
which; its functions return the second at which each iteration is published.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Speed:
    """slowdown: of all sequences by each that runs, as a share. running: the most that run at a
    time; others wait in line."""

    slowdown: float
    running: int


@dataclass
class Engine:
    """Sequences that run side by side, and those that wait in line, by the group that they are of.

    time: its clock, in seconds. Sequences end by their progress, of which a second makes less the
    more of them run.
    """

    speed: Speed
    time: float = 0.0
    _progress: float = 0.0
    _running: list[tuple[float, int]] = field(default_factory=list)
    _line: deque[tuple[float, int]] = field(default_factory=deque)

    @property
    def live(self) -> int:
        """Sequences that run or wait."""
        return len(self._running) + len(self._line)

    def add(self, seconds: float, group: int = 0) -> None:
        """Have a sequence run, which would take so many seconds alone."""
        self._line.append((seconds, group))
        self._fill()

    def next_end(self) -> float:
        """When the next sequence ends; never where none runs."""
        if not self._running:
            return math.inf
        return self.time + (self._running[0][0] - self._progress) * self._factor()

    def go_on(self, until: float) -> None:
        """Decode until then, when no sequence has ended yet."""
        self._progress += (until - self.time) / self._factor()
        self.time = until

    def end(self) -> int:
        """Go on until the next sequence ends; its group."""
        self.time = self.next_end()
        self._progress, group = heapq.heappop(self._running)
        self._fill()
        return group

    def _factor(self) -> float:
        return 1 + self.speed.slowdown * len(self._running)

    def _fill(self) -> None:
        while self._line and len(self._running) < self.speed.running:
            seconds, group = self._line.popleft()
            heapq.heappush(self._running, (self._progress + seconds, group))


def play(sequences: Sequence[float], speed: Speed) -> float:
    """Seconds until an engine has played all sequences, begun in this order: those of `Engine`."""
    running = [*sequences[: speed.running]]
    heapq.heapify(running)
    time = progress = 0.0
    for seconds in sequences[speed.running :]:
        # The next one in line takes the place of the one that ends.
        end = running[0]
        time += (end - progress) * (1 + speed.slowdown * len(running))
        progress = end
        heapq.heapreplace(running, progress + seconds)
    for left, end in zip(range(len(running), 0, -1), sorted(running), strict=True):
        time += (end - progress) * (1 + speed.slowdown * left)
        progress = end
    return time


def pinned(
    rollouts: Sequence[Sequence[float]],
    training: Sequence[float],
    staleness: int,
    side_by_side: bool,
) -> list[float]:
    """Rollout k is played with version max(0, k - staleness). rollouts: seconds by iteration and
    engine. training: seconds from the sealed rollout to the published version. side_by_side:
    engines and learner have devices of their own, or share them; else they take turns."""
    published: list[float] = []
    free = [0.0] * max(map(len, rollouts))
    for k, (played, trained) in enumerate(zip(rollouts, training, strict=True)):
        before = published[-1] if published else 0.0
        oldest = published[k - 1 - staleness] if k > staleness else 0.0
        begin = oldest if side_by_side else before
        for engine, seconds in enumerate(played):
            free[engine] = max(free[engine], begin) + seconds
        published.append(max(before, *free[: len(played)]) + trained)
    return published


@dataclass
class Stream:
    """Groups are admitted in order while an engine has room and none gets too old; batch k is
    groups kB to (k + 1)B - 1, whoever ends first.

    groups: seconds of each sequence, alone. training: seconds from a complete batch to the
    published version, one for each batch. live: sequences that an engine may hold. side_by_side: as
    of `pinned`; else the engines stand still while the learner trains.
    """

    groups: Sequence[Sequence[float]]
    training: Sequence[float]
    staleness: int
    side_by_side: bool
    live: int
    engines: list[Engine]
    _admitted: int = 0
    _version: int = 0
    _stood: float = 0.0
    _published: list[float] = field(default_factory=list)
    _left: Counter[int] = field(default_factory=Counter)
    _ends: list[tuple[float, int]] = field(default_factory=list)

    def run(self) -> list[float]:
        """The second at which each version is published. To be called once."""
        for group, sequences in enumerate(self.groups):
            self._left[group // self._size] += len(sequences)
        self._admit(0.0)
        while len(self._published) < len(self.training):
            until, number = self._next_end()
            waits = self._version < len(self._published)
            if waits and self._published[self._version] <= until:
                until = self._published[self._version]
                self._version += 1
                self._admit(until)
                continue
            heapq.heappop(self._ends)
            engine, version = self.engines[number], self._version
            self._left[engine.end() // self._size] -= 1
            self._told(number)
            self._train(until)
            if version < self._version or engine.live + len(self.groups[0]) <= self.live:
                self._admit(until)
        return self._published

    @property
    def _size(self) -> int:
        return len(self.groups) // len(self.training)

    def _next_end(self) -> tuple[float, int]:
        """When a sequence ends next, and the number of its engine."""
        while self._ends and self.engines[self._ends[0][1]].next_end() != self._ends[0][0]:
            heapq.heappop(self._ends)
        return self._ends[0] if self._ends else (math.inf, -1)

    def _told(self, number: int) -> None:
        heapq.heappush(self._ends, (self.engines[number].next_end(), number))

    def _admit(self, now: float) -> None:
        bound = min(len(self.groups), (self._version + self.staleness + 1) * self._size)
        while self._admitted < bound:
            number = min(range(len(self.engines)), key=lambda each: self.engines[each].live)
            engine, sequences = self.engines[number], self.groups[self._admitted]
            if engine.live and engine.live + len(sequences) > self.live:
                return
            engine.go_on(now)
            for seconds in sequences:
                engine.add(seconds, self._admitted)
            self._told(number)
            self._admitted += 1

    def _train(self, now: float) -> None:
        """Train on the batches that are complete. now: by the engines' clocks."""
        while (k := len(self._published)) < len(self.training) and not self._left[k]:
            if self.side_by_side:
                before = self._published[-1] if self._published else 0.0
                self._published.append(max(before, now) + self.training[k])
                continue
            self._stood += self.training[k]
            self._published.append(now + self._stood)
            self._version += 1
