"""Groups that engines play as a stream: admitted under a bound, sealed one by one, collected in
order (`schedule.mode: stream`).

Batch k is groups k * B to (k + 1) * B - 1. An engine that plays policy version v is given groups
below (v + staleness + 1) * B, so that no token is older than that when its batch is trained. What
is admitted and playing is known here only: whoever goes on with the run plays what no line of the
journal names, from where it was parked, or anew.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from typing import Any

from earl_core.cluster.errors import WorkerLost
from earl_core.control.batch_tally import BatchTally, merged
from earl_core.control.failure_diagnosis import loss_of
from earl_core.control.group_admission import admitted
from earl_core.control.group_draws import GroupDraws
from earl_core.control.interrupted_groups import InterruptedGroups
from earl_core.control.row_draws import RowDraws
from earl_core.control.streamed_engine import StreamedEngine
from earl_core.control.worker_groups import Progress, WorkerGroups
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.dispatch import Manifest
from earl_core.rollout import rollout_stats
from earl_core.run import RunDirectory
from earl_core.run.group_batches import GroupBatches
from earl_core.run.group_journal import SealedGroup
from earl_core.run.policy_versions import carried
from earl_core.run.replay import replay_metrics, replay_outputs
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

    def __init__(
        self, run: RunDirectory, groups: WorkerGroups, tell: Progress, rows: RowDraws
    ) -> None:
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
        self._draws = GroupDraws(run, rows)
        self._interrupted = InterruptedGroups(run, self._batches)
        rollout = run.config.rollout
        self._tally = BatchTally(rollout.prompts_per_iteration * rollout.group_size)
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
        self._tally.begin()
        self._wait_for_clock()
        self._raise_error(ahead=True)
        with self._changed:
            self._batches.settle(iteration)
            self._draws.settle(iteration)
            self._interrupted.settle()
            self._tally.settle(self._batches.of(iteration))
            self._beyond = 0
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
        return self._result(deployment, iteration, carried_over)

    def oldest(self, newest: int) -> int:
        """The oldest version up to this one whose weights an engine may yet load."""
        with self._changed:
            if self._newest is None or not self._running():
                return newest
            wanted = (each.wanted for each in self._engines.values() if each.wanted is not None)
            return min(newest, carried(self._newest), *wanted)

    def rest(self) -> None:
        """Have the engines park what is playing, until the next batch is asked for."""
        self._end_threads()

    def close(self) -> None:
        """Have the threads end, before the groups do, which park what is playing for whoever goes
        on. Calls that take longer are cut off with their groups."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS)
        self._interrupted.settle()

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
            with self._changed:
                # Nobody waits for one that has not begun.
                thread.start()
                self._threads.append(thread)

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
                self._tally.lost += isinstance(error, WorkerLost)
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
                self._tally.probed(found["probe"])
        if groups := self._admitted(engine):
            found = self._call(engine, "admit", groups=groups)
            engine.room = int(found["room"])
            with self._changed:
                self._interrupted.resumed += len(found["resumed"])
                parked = {each["group"] for each in groups if each["parked"]}
                refused = sorted(parked.difference(found["resumed"]))
                self._interrupted.unlike(refused, self._iteration)
        if engine.playing:
            slices = None if self._clock is None else 1
            found = self._call(engine, "finished", seconds=_WAIT_SECONDS, slices=slices)
            self._take(engine, found)
        elif self._clock is None:
            with self._changed:
                self._changed.wait(_WAIT_SECONDS)

    def _admitted(self, engine: StreamedEngine) -> list[dict[str, Any]]:
        """The groups that the engine begins now, or goes on with, as `GroupWorker.admit` has them.
        They are playing from now on."""
        first = self._iteration * self._config.rollout.prompts_per_iteration
        with self._changed:
            engines = self._engines.values()
            chosen = admitted(self._config, self._batches, engines, engine, first, self._until)
            engine.playing.update(chosen)
            parked = self._interrupted.taken(chosen, engine.version or 0, self._iteration)
            given = []
            for group in chosen:
                label, prompt = self._draws.of(group)
                key = self._batches.key(self._batch_of(group))
                each = {"group": group, "environment": label, "prompt": prompt, "key": key}
                given.append({**each, "parked": group in parked})
            return given

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
            self._interrupted.unlike(found["anew"], self._iteration)
            self._batches.seal(sealed)
            now = [each for each in sealed if self._batch_of(each.group) == self._iteration]
            self._tally.took(sealed, now)
            engine.room = int(found["room"])
            engine.playing.difference_update(each.group for each in sealed)
            self._changed.notify_all()
        if sealed:
            self._tell("collect", self._iteration, self._tally.progress(len(self._engines)))

    def _batch_of(self, group: int) -> int:
        return group // self._config.rollout.prompts_per_iteration

    def _digest(self, version: int) -> str:
        versions = self._run.versions
        return str(self._run.manifest(*versions.publication(version)).outputs["digest"])

    def _forget(self, engine: StreamedEngine) -> None:
        """What the engine was playing is to be admitted again."""
        self._lose(engine, set(engine.playing))
        engine.group, engine.version = None, None

    def _lose(self, engine: StreamedEngine, groups: set[int]) -> None:
        """Some of the groups that the engine was given are to be admitted again."""
        self._interrupted.add(groups)
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

    def _result(
        self, deployment: StageDeployment, iteration: int, carried_over: int
    ) -> dict[str, Any]:
        groups = self._batches.of(iteration)
        stats = self._tally.end(groups, self._goes_ahead)
        try:
            acts = self._config.guard == "act"
            rollout_stats.check_failures(stats, self._config.rollout.max_failed_share, acts)
        except Exception:
            # What broke them may have broken groups of later batches, too.
            self._end_threads()
            self._batches.play_anew(self._batches.failing(iteration))
            raise
        versions = {v: digest for group in groups for v, digest in group.versions.items()}
        with self._changed:
            again = self._batches.replayed(iteration)
        anew, self._batches.anew = self._batches.anew, 0
        resumed, self._interrupted.resumed = self._interrupted.resumed, 0
        outputs: dict[str, Any] = {
            **self._draws.outputs(iteration),
            "groups": [groups[0].group, groups[-1].group + 1],
            "versions": {str(version): versions[version] for version in sorted(versions)},
            **replay_outputs(self._config, again),
        }
        if stats.failures:
            outputs["failures"] = redact_tree(stats.failures)
        entries = self._batches.entries([*groups, *again])
        own, episodes = sum(bool(each.shards) for each in groups), merged(again).episodes
        return {
            "shards": [entry.model_dump(mode="json") for entry in entries],
            "outputs": outputs,
            "metrics": {
                **self._tally.metrics(stats, self._engines.values()),
                "replicas": float(deployment.replicas),
                "groups_carried": float(carried_over),
                "groups_anew": float(anew),
                "groups_resumed": float(resumed),
                **self._draws.metrics(iteration),
                **replay_metrics(self._config, again, iteration, episodes, own),
            },
        }
