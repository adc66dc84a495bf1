"""The engines at work on one job: a rollout or an evaluation, dealt out and played side by side.

Each engine is a worker group of its own. The items are dealt in shares (`dealing`), one for each
engine, whichever is the first: on which host an episode lies does not depend on time, because ranks
train on what lies near them. An engine that is lost costs its share, which the others then play,
also if they have gone on to the next rollout meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from earl_core.cluster.errors import WorkerError
from earl_core.cluster.group import Group
from earl_core.control.dealing import Deal, Items, contiguous
from earl_core.control.failure_diagnosis import ReplicasLost, is_loss
from earl_core.control.run_controller import RunController
from earl_core.control.stage_execution import StageWatch
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.rollout.rollout_stats import RolloutStats
from earl_core.system.errors import Cancelled

logger = logging.getLogger(__name__)

_MOST_LOSSES = 2
"""Engines that a share may cost; what ends two of them would end the others too."""


@dataclass(frozen=True)
class Share:
    """Items that one engine plays in one call: prompts or held-out episodes, counted from 0."""

    number: int
    items: Items
    losses: int = 0

    @property
    def first(self) -> int:
        """The least of its items."""
        return min(self.items)


@dataclass(frozen=True)
class Played:
    """A share's result, and the engine that gave it."""

    share: Share
    member: int
    result: dict[str, Any]

    @property
    def tally(self) -> RolloutStats:
        """Counts that the engine kept."""
        return RolloutStats.model_validate(self.result["tally"])


@dataclass(frozen=True)
class Job:
    """The work of the engines in a stage. arguments: those of the worker's `method` for a share.
    deal: how items are divided; in neighbours where the method takes nothing else."""

    stage: str
    iteration: int
    method: str
    items: int
    arguments: Callable[[Share], dict[str, Any]]
    weights: dict[str, Any]
    deal: Deal = contiguous


def run(
    controller: RunController, deployment: StageDeployment, job: Job
) -> tuple[list[Played], Engines]:
    """Have the deployment's engines do a job; the shares' results by ascending items.

    Each engine first takes the weights. Raises `ReplicasLost`, what a worker raised, or, with one
    engine only, what lost it.
    """
    controller.groups.retire("rollout", deployment.replicas)
    engines = Engines(controller, deployment, job)
    engines.work()
    engines.write_down()
    return sorted(engines.done, key=lambda played: played.share.first), engines


@dataclass
class Engines:
    """Engines at work on one job, each in a thread; `_changed` guards what they share.

    done: the shares that were played. lost: engines that were lost at it. probe: see
    `probing.answered`; of all engines the worst.
    """

    controller: RunController
    deployment: StageDeployment
    job: Job
    done: list[Played] = field(default_factory=list)
    lost: dict[int, WorkerError] = field(default_factory=dict)
    probe: dict[str, float] = field(default_factory=dict)
    _waiting: deque[Share] = field(default_factory=deque)
    _playing: dict[int, Share] = field(default_factory=dict)
    _progress: dict[int, dict[str, Any]] = field(default_factory=dict)
    _finished: list[tuple[int, float]] = field(default_factory=list)
    _built: list[float] = field(default_factory=list)
    _shares: int = 0
    _rebuilt: int = 0
    _used: dict[int, Group] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _given_up: threading.Event = field(default_factory=threading.Event)

    def work(self) -> None:
        """Play all items, or raise."""
        self._deal(range(self.job.items), self.deployment.replicas, losses=0)
        self.controller.turns.ask(self.deployment.replicas, self.job.iteration)
        if self.deployment.replicas == 1:
            self._engine(0)
            return
        with ThreadPoolExecutor(self.deployment.replicas, "earl-engine") as pool:
            engines = [pool.submit(self._engine, each) for each in range(self.deployment.replicas)]
            try:
                wait(engines, return_when=FIRST_EXCEPTION)
            finally:
                # What one engine raised ends the work of the others.
                self._given_up.set()
                with self._changed:
                    self._changed.notify_all()
        for engine in engines:
            engine.result()

    def write_down(self) -> None:
        """Note the time that starting engines took, side by side, and the engines lost for
        memory."""
        watch = StageWatch(self.controller, self.deployment, self.job.iteration)
        if self._built:
            watch.switched(max(self._built))
        for error in self.lost.values():
            watch.lost_engine(error)

    def _name(self, share: Share) -> str:
        what = "held-out episodes" if self.job.stage == "evaluation" else "prompts"
        count, first, last = len(share.items), share.first, max(share.items)
        of = "" if last - first < count else f"{count} of "
        return f"{of}{what} {first} to {last}"

    def metrics(self) -> dict[str, float]:
        """Count the engines, and those that were lost: at work, or idle."""
        return {
            "replicas": float(self.deployment.replicas),
            "replicas_lost": float(len(self.lost) + self._rebuilt),
        }

    def _deal(self, items: Items, count: int, losses: int) -> None:
        for part in self.job.deal(items, count):
            self._waiting.append(Share(self._shares, part, losses))
            self._shares += 1

    def _engine(self, member: int) -> None:
        turns, asked = self.controller.turns, True
        try:
            while asked or self._comes_back(member):
                with turns.turn(member, self.job.iteration, self._is_over, asked):
                    if asked:
                        self._ready(member)
                    self._play(member)
                if asked and self.job.stage == "rollout" and not self._given_up.is_set():
                    turns.left(self.job.iteration)
                asked = False
        except Cancelled:
            if not self._is_over():
                raise
        except WorkerError as error:
            if self._given_up.is_set():
                return
            if not is_loss(error) or self.controller.stop_requested.is_set():
                raise
            self._lose(member, self._playing.get(member), error)

    def _is_over(self) -> bool:
        """Tell whether all is played, or given up."""
        with self._changed:
            return self._given_up.is_set() or not (self._waiting or self._playing)

    def _play(self, member: int) -> None:
        """Play the shares that wait for this engine."""
        while True:
            with self._changed:
                share = self._next(member)
                if share is None or self._given_up.is_set():
                    return
                self._waiting.remove(share)
                self._playing[member] = share
            began = time.perf_counter()
            result = self._call(member, self.job.method, **self.job.arguments(share))
            told = f"engine {member} played {self._name(share)} in"
            told += f" {time.perf_counter() - began:.3f} s"
            self.controller.run.note(self.job.iteration, self.job.stage, told)
            self._finish(Played(share, member, result))

    def _ready(self, member: int) -> None:
        started, before = time.perf_counter(), self.controller.groups.live("rollout", member)
        found = self._call(member, "ensure")["probe"]
        with self._changed:
            # The worst of all engines.
            self.probe = {n: max(value, self.probe.get(n, value)) for n, value in found.items()}
        ahead = self.controller.groups.started_ahead("rollout", member)
        if ahead is not None:
            self._built.append(ahead.seconds(started))
        elif self.controller.groups.live("rollout", member) is not before:
            self._built.append(time.perf_counter() - started)

    def _next(self, member: int) -> Share | None:
        """The next share for this engine: its own, or what a lost one leaves."""
        others = range(self.deployment.replicas)
        return next(
            (
                share
                for share in self._waiting
                if share.number == member or share.number not in others or share.number in self.lost
            ),
            None,
        )

    def _comes_back(self, member: int) -> bool:
        """Wait for a share of an engine that is lost; whether one has come."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._next(member)
                    or not (self._waiting or self._playing)
                    or self._given_up.is_set()
                )
            )
            return self._next(member) is not None and not self._given_up.is_set()

    def _finish(self, played: Played) -> None:
        with self._changed:
            self._playing.pop(played.member)
            self._progress.pop(played.member, None)
            self.done.append(played)
            tally = played.tally
            self._finished.append((tally.episodes + tally.failed, tally.returns.mean))
            self._changed.notify_all()

    def _lose(self, member: int, share: Share | None, error: WorkerError) -> None:
        replicas, job = self.deployment.replicas, self.job
        if replicas == 1:
            raise error
        with self._changed:
            self.lost[member] = error
            left = replicas - len(self.lost)
            last = f"The last error: {error}"
            if not left and (share or self._waiting):
                raise ReplicasLost(
                    f"all {replicas} rollout engines were lost in '{job.stage}' of iteration "
                    f"{job.iteration}, with episodes still to play; resume the run once the cause "
                    f"is removed. {last}",
                    error,
                )
            if share is not None and share.losses + 1 >= _MOST_LOSSES:
                raise ReplicasLost(
                    f"{self._name(share)} of '{job.stage}' of iteration {job.iteration} have cost "
                    f"{_MOST_LOSSES} engines, so they are not tried on another. {last}",
                    error,
                )
            self._playing.pop(member, None)
            self._progress.pop(member, None)
            if share is not None:
                self._deal(share.items, left, share.losses + 1)
            self._changed.notify_all()
        again = f"{self._name(share)} are played again" if share else "it was playing nothing"
        note = f"engine {member} of {replicas} was lost ({error.reason}); {again}"
        logger.warning("rollout %s; the run goes on with %d", note, left)
        self.controller.run.note(job.iteration, job.stage, note)

    def _call(self, member: int, method: str, **arguments: Any) -> dict[str, Any]:
        """Load and play in one call, because its process may be a fresh one."""
        controller, job = self.controller, self.job
        group = controller.groups.get("rollout", self.deployment, member)
        with self._changed:
            self._rebuilt += self._used.get(member, group) is not group
            self._used[member] = group
        results: list[dict[str, Any]] = group.call(
            method,
            stage=job.stage,
            iteration=job.iteration,
            deadline_seconds=controller.config.deadlines.stage,
            on_progress=lambda progress: self._report(member, progress),
            abort=self._given_up,
            weights=job.weights,
            **arguments,
        )
        return results[0]

    def _report(self, member: int, progress: dict[str, Any]) -> None:
        """Pass on what all engines have done together."""
        with self._changed:
            if member in self._playing:
                self._progress[member] = progress
                self.controller.listener(self.job.stage, self.job.iteration, self._together())

    def _together(self) -> dict[str, Any]:
        now = list(self._progress.values())
        counts = [*self._finished, *((p["episodes_done"], p["return"]) for p in now)]
        done = sum(count for count, _ in counts)
        size = 1 if self.job.stage == "evaluation" else self.controller.config.rollout.group_size
        return {
            "episodes_done": done,
            "episodes": self.job.items * size,
            "tokens_per_second": sum(p["tokens_per_second"] for p in now),
            "return": sum(count * mean for count, mean in counts) / max(done, 1),
            "engines": self.deployment.replicas - len(self.lost),
        }
