"""Groups that engines play as a stream: admitted under a bound, sealed one by one, collected in
order (`schedule.mode: stream`).

Batch k is groups k * B to (k + 1) * B - 1. An engine that plays policy version v is given groups
below (v + staleness + 1) * B, so that no token is older than that when its batch is trained. What
is admitted and playing is known here only: whoever goes on with the run plays anew what no line of
the journal names.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from earl_core.cluster.errors import WorkerLost
from earl_core.control.failure_diagnosis import loss_of
from earl_core.control.group_draws import GroupDraws
from earl_core.control.streamed_engine import StreamedEngine
from earl_core.control.worker_groups import Progress, WorkerGroups
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.dispatch import Manifest
from earl_core.rollout import rollout_stats
from earl_core.rollout.rollout_stats import RolloutStats, merge
from earl_core.run import RunDirectory
from earl_core.run.group_batches import GroupBatches
from earl_core.run.group_journal import SealedGroup
from earl_core.run.policy_versions import carried
from earl_core.secrets import redact_tree
from earl_core.system import fault_points
from earl_core.system.errors import Cancelled

logger = logging.getLogger(__name__)

_WAIT_SECONDS = 0.2
"""Of a call that waits for a group to end: an engine takes no new weights meanwhile."""

_CLOSE_SECONDS = 5.0

CLOCK = "EARL_CLOCK"
"""Environment variable for tests: time is slices of tokens. An engine plays so many of them after a
batch is complete, and then waits for the next version. Runs with equal clocks are equal."""


class GroupStream:
    """The stream of one run. `_changed` guards what threads share; each thread calls its own
    engines."""

    def __init__(self, run: RunDirectory, groups: WorkerGroups, tell: Progress) -> None:
        self._run, self._config = run, run.config
        self._groups, self._tell = groups, tell
        self._batches = GroupBatches(run)
        self._engines: dict[int, StreamedEngine] = {}
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._ending = self._closed = False
        self._iteration, self._until, self._goes_ahead = 0, 0, False
        self._deployment: StageDeployment | None = None
        self._newest: Manifest | None = None
        self._probe: dict[str, float] = {}
        self._lost = self._tokens = 0
        self._draws = GroupDraws(run)
        self._tally = RolloutStats()
        self._since: float | None = None
        clock = os.environ.get(CLOCK)
        self._clock = None if clock is None else int(clock)
        self._beyond = 0

    def collect(
        self, deployment: StageDeployment, iteration: int, weights: Manifest, alone: bool
    ) -> dict[str, Any]:
        """Wait until the iteration's batch is complete; `shards`, `outputs`, `metrics`.

        weights: of the version that the iteration trains. alone: admit no group of a later batch.
        Where rollout and update take turns the engines are parked when this returns. Raises what
        ended an engine's work, and `RolloutFailed` where too many episodes of the batch failed;
        groups with failures are then to be played anew.
        """
        # Of engines that play on meanwhile a batch's time begins at the end of the one before.
        self._since = self._since or time.monotonic()
        self._wait_for_clock()
        self._raise_error(ahead=True)
        with self._changed:
            self._batches.settle(iteration)
            self._draws.settle(iteration)
            self._tally = _merged(self._batches.of(iteration))
            self._beyond, self._probe = 0, {}
            self._iteration, self._newest, self._deployment = iteration, weights, deployment
            last = iteration + 1 if alone else self._config.iterations
            self._until = last * self._config.rollout.prompts_per_iteration
            self._goes_ahead = self._groups.division.placed.side_by_side and not alone
            carried_over = sum(len(each.playing) for each in self._engines.values())
            self._changed.notify_all()
        self._start(deployment.replicas)
        with self._changed:
            while not self._is_decided() and self._running():
                self._changed.wait(_WAIT_SECONDS)
        if not self._goes_ahead:
            self._end_threads()
        self._raise_error()
        if not self._is_decided():
            raise Cancelled("the run was asked to stop")
        now = time.monotonic()
        seconds, self._since = now - self._since, now if self._goes_ahead else None
        return self._result(deployment, iteration, seconds, carried_over)

    def oldest(self, newest: int) -> int:
        """The oldest version up to this one whose weights an engine may yet load."""
        with self._changed:
            if self._newest is None or not self._running():
                return newest
            wanted = (each.wanted for each in self._engines.values() if each.wanted is not None)
            return min(newest, carried(self._newest), *wanted)

    def close(self) -> None:
        """Have the threads end, before the groups do; what is playing is played anew by whoever
        goes on. Calls that take longer are cut off with their groups."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS)

    def _raise_error(self, ahead: bool = False) -> None:
        """Raise what has ended an engine's work, once, when the others have ended too. ahead: it
        played for a later batch, so that a loss, as aside by an evaluation, costs no repeat."""
        if (error := self._error) is None:
            return
        self._end_threads()
        self._error = None
        if not ahead or loss_of(error) is None:
            raise error
        logger.warning("an engine that played ahead was lost: %s", error)
        self._run.note(self._iteration, "collect", f"an engine that played ahead was lost: {error}")

    def _wait_for_clock(self) -> None:
        """Under a clock, wait until the engines have played as far as it goes."""
        if self._clock is None:
            return
        with self._changed:
            # Threads that are asked to stop end without a word.
            while self._running() and not self._is_at_rest() and self._error is None:
                self._changed.wait(_WAIT_SECONDS)

    def _is_decided(self) -> bool:
        return self._error is not None or self._batches.is_complete(self._iteration)

    def _is_at_rest(self) -> bool:
        return self._clock is not None and self._beyond >= self._clock and self._is_decided()

    def _running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def _start(self, engines: int) -> None:
        """Have so many engines at work, each in a thread, or under a clock all in one."""
        alive = bool(self._threads) and all(thread.is_alive() for thread in self._threads)
        if alive and set(self._engines) == set(range(engines)):
            return
        self._end_threads()
        self._groups.retire("rollout", engines)
        for member in [each for each in self._engines if each >= engines]:
            self._forget(self._engines.pop(member))
        members = [[each] for each in range(engines)]
        for member in range(engines):
            self._engines.setdefault(member, StreamedEngine(member))
        for some in members if self._clock is None else [list(range(engines))]:
            thread = threading.Thread(
                target=self._work, args=(some,), name=f"earl-groups-{some[0]}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _end_threads(self) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads, self._ending = [], False

    def _work(self, members: Sequence[int]) -> None:
        engines = [self._engines[member] for member in members]
        try:
            while self._goes_on():
                for engine in engines:
                    self._round(engine)
                with self._changed:
                    self._beyond += self._is_decided()
                    self._changed.notify_all()
                    while self._is_at_rest() and self._goes_on():
                        self._changed.wait(_WAIT_SECONDS)
            for engine in engines:
                if engine.group is not None and engine.group.alive and not self._closed:
                    self._call(engine, "park")
                    # What has its memory meanwhile may cost it its weights.
                    engine.version = None
        except BaseException as error:
            logger.info("the engines %s stopped playing groups: %s", members, error)
            with self._changed:
                for engine in engines:
                    self._forget(engine)
                self._lost += isinstance(error, WorkerLost)
                if self._error is None:
                    self._error = error
                self._changed.notify_all()

    def _goes_on(self) -> bool:
        with self._changed:
            stopping = self._ending or self._closed or self._groups.stop_requested.is_set()
            if stopping or self._error is not None:
                return False
            return self._goes_ahead or not self._is_decided()

    def _round(self, engine: StreamedEngine) -> None:
        """Load the newest weights, admit groups while there is room, and take those that have
        ended."""
        assert self._deployment is not None
        group = self._groups.get("rollout", self._deployment, engine.member)
        with self._changed:
            newest = self._newest
            assert newest is not None
            wanted = carried(newest), str(newest.outputs["digest"])
            engine.wanted = wanted[0]
            fresh = engine.group is not group
            if fresh:
                self._forget(engine)
                engine.group = group
        if (engine.version, engine.digest) != wanted:
            found = self._call(engine, "load", weights=newest.outputs["weights"], anew=fresh)
            with self._changed:
                # Its engine may have been ended meanwhile, as by an evaluation.
                self._lose(engine, engine.playing - set(found["playing"]))
                engine.version, engine.digest = wanted
                engine.room = int(found["room"])
                worst = self._probe
                worst |= {n: max(each, worst.get(n, each)) for n, each in found["probe"].items()}
        with self._changed:
            admitted = self._admitted(engine)
        if admitted:
            engine.room = int(self._call(engine, "admit", groups=self._drawn(admitted))["room"])
        if engine.playing:
            slices = None if self._clock is None else 1
            found = self._call(engine, "finished", seconds=_WAIT_SECONDS, slices=slices)
            self._take(engine, found)
        elif self._clock is None:
            with self._changed:
                self._changed.wait(_WAIT_SECONDS)

    def _admitted(self, engine: StreamedEngine) -> list[int]:
        """The next groups that the engine may begin, in order; they are playing from now on.
        Engines have even parts of what there is to play."""
        rollout, version = self._config.rollout, engine.version or 0
        size = rollout.group_size
        ahead = version + self._config.schedule.staleness + 1
        bound = min(ahead * rollout.prompts_per_iteration, self._until)
        playing = set().union(*(each.playing for each in self._engines.values()))
        first = self._iteration * rollout.prompts_per_iteration
        open_ = [g for g in range(first, bound) if g not in playing and g not in self._batches]
        part = -(-(len(open_) + len(playing)) // len(self._engines))
        chosen: list[int] = []
        room = engine.room
        for group in open_:
            fits = room >= size or not (engine.playing or chosen)
            if not fits or len(engine.playing) + len(chosen) >= part:
                break
            chosen.append(group)
            room -= size
        engine.playing.update(chosen)
        return chosen

    def _drawn(self, groups: Sequence[int]) -> list[tuple[int, str, int]]:
        """What groups play: their numbers, an environment's label and its prompt."""
        with self._changed:
            return [(group, *self._draws.of(group)) for group in groups]

    def _take(self, engine: StreamedEngine, found: dict[str, Any]) -> None:
        sealed = [
            SealedGroup.model_validate(
                {
                    "group": each["group"],
                    "key": self._batches.key(self._batch_of(each["group"])),
                    "shards": each["shards"],
                    "tally": redact_tree(each["tally"]),
                    "versions": {v: self._digest(v) for v in each["versions"]},
                }
            )
            for each in found["groups"]
        ]
        for each in sealed:
            fault_points.point(f"group.taken{each.group}", self._batch_of(each.group))
        with self._changed:
            self._batches.seal(sealed)
            self._tokens += _merged(sealed).load.generated_tokens
            now = [each for each in sealed if self._batch_of(each.group) == self._iteration]
            self._tally = merge([[self._tally, _merged(now)]])
            engine.room = int(found["room"])
            engine.playing.difference_update(each.group for each in sealed)
            self._changed.notify_all()
        if sealed:
            self._tell("collect", self._iteration, self._progress())

    def _batch_of(self, group: int) -> int:
        return group // self._config.rollout.prompts_per_iteration

    def _digest(self, version: int) -> str:
        versions = self._run.versions
        return str(self._run.manifest(*versions.publication(version)).outputs["digest"])

    def _forget(self, engine: StreamedEngine) -> None:
        """What the engine was playing is played anew."""
        self._lose(engine, set(engine.playing))
        engine.group, engine.version = None, None

    def _lose(self, engine: StreamedEngine, groups: set[int]) -> None:
        """Some of the groups that the engine was given are played anew."""
        if groups:
            listed = ", ".join(map(str, sorted(groups)))
            text = f"engine {engine.member} is not what it was: groups {listed} are played anew"
            logger.warning("%s", text)
            self._run.note(self._iteration, "collect", text)
        self._batches.anew += len(groups)
        engine.playing -= groups

    def _call(self, engine: StreamedEngine, method: str, **arguments: Any) -> dict[str, Any]:
        assert engine.group is not None
        results: list[dict[str, Any]] = engine.group.call(
            method,
            stage="collect",
            iteration=self._iteration,
            deadline_seconds=self._config.deadlines.stage,
            **arguments,
        )
        # Of the call that has just ended.
        engine.peak = max(engine.peak, sum(use.tree_peak_bytes for use in engine.group.memory))
        return results[0]

    def _progress(self) -> dict[str, Any]:
        tally, rollout = self._tally, self._config.rollout
        seconds = 0.0 if self._since is None else time.monotonic() - self._since
        return {
            "episodes_done": tally.episodes + tally.failed,
            "episodes": rollout.prompts_per_iteration * rollout.group_size,
            "tokens_per_second": tally.load.generated_tokens / seconds if seconds else 0.0,
            "return": tally.returns.mean,
            "engines": len(self._engines),
        }

    def _result(
        self, deployment: StageDeployment, iteration: int, seconds: float, carried_over: int
    ) -> dict[str, Any]:
        groups = self._batches.of(iteration)
        tally = _merged(groups)
        # A group's own seconds pass side by side with those of others, and its tokens may be of an
        # earlier iteration's time.
        load = replace(tally.load, seconds=seconds, generated_tokens=self._tokens)
        self._tokens = 0
        tally = tally.model_copy(update={"load": load})
        try:
            rollout_stats.check_failures(tally, self._config.rollout.max_failed_share)
        except Exception:
            # What broke them may have broken groups of later batches, too.
            self._end_threads()
            self._batches.play_anew(self._batches.failing(iteration))
            raise
        versions = {v: digest for group in groups for v, digest in group.versions.items()}
        anew, self._batches.anew = self._batches.anew, 0
        lost, self._lost = self._lost, 0
        peak = sum(each.peak for each in self._engines.values())
        for each in self._engines.values():
            each.peak = 0.0
        outputs: dict[str, Any] = {
            **self._draws.outputs(iteration),
            "groups": [groups[0].group, groups[-1].group + 1],
            "versions": {str(version): versions[version] for version in sorted(versions)},
        }
        if tally.failures:
            outputs["failures"] = redact_tree(tally.failures)
        return {
            "shards": [entry.model_dump(mode="json") for entry in self._batches.entries(iteration)],
            "outputs": outputs,
            "metrics": {
                **rollout_stats.rollout_metrics(tally),
                **self._probe,
                "replicas": float(deployment.replicas),
                "groups_carried": float(carried_over),
                "groups_anew": float(anew),
                "replicas_lost": float(lost),
                "peak_bytes": float(peak),
            },
        }


def _merged(groups: Sequence[SealedGroup]) -> RolloutStats:
    return merge([[RolloutStats.model_validate(each.tally) for each in groups]])
