"""One call to all ranks of a group: send, gather, merge, and what happens when it goes wrong.

A thread listens to the group's ranks, so that a loss is known at once, call or no call. A rank
returns `{"shards": [...], "metrics": {name: number}, "weight": n}`: `weight` is how many things
(episodes, tokens) its means are over.
"""

from __future__ import annotations

import logging
import math
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

from earl_core.cluster import errors
from earl_core.cluster.errors import LossKind, describe_exit
from earl_core.cluster.host import MemoryUse, RankHandle
from earl_core.secrets import redact_tree, shareable
from earl_core.system.frames import WireError, encode
from earl_core.system.processes import ENDING_GRACE_SECONDS

logger = logging.getLogger(__name__)

Json = dict[str, Any]
Progress = Callable[[Json], None]

STRAGGLER_SECONDS = 5.0
"""Seconds in which other ranks may still answer after one has failed, which they may wait for."""

CANCEL_SECONDS = 10.0
"""Seconds that a cancelled call may take to return before it costs the group."""

_DUMP_SECONDS = 1.5
_POLL_SECONDS = 1.0


class Aborted(BaseException):
    """The caller gave the exchange up."""


@dataclass
class Exchange:
    """One request to all ranks; the group sees to it that there is only one at a time. frames: one
    encoded message for each rank, in their order. abort: gives the request up."""

    monitor: Monitor
    where: errors.Where
    call_id: int
    frames: Sequence[bytes]
    deadline_seconds: float
    abort: threading.Event
    on_progress: Progress | None = None

    def run(self) -> list[Any]:
        """Return the results in rank order, or raise a `WorkerError`. Raises `Aborted` as soon as
        `abort` is set, with the call still under way."""
        deadline = time.monotonic() + self.deadline_seconds
        monitor, condition = self.monitor, self.monitor.condition
        with condition:
            monitor.call_id = self.call_id
            monitor.progress.clear()
            for rank in monitor.ranks:
                rank.reply = None
        for rank, frame in zip(monitor.ranks, self.frames, strict=True):
            self._send(rank, frame)
        while True:
            with condition:
                progress = list(monitor.progress)
                monitor.progress.clear()
                results = None if progress else self._outcome()
                if results is None and not progress:
                    if self.abort.is_set():
                        raise Aborted
                    left = deadline - time.monotonic()
                    if left <= 0:
                        self._expire()
                    condition.wait(min(left, _POLL_SECONDS))
            if results is not None:
                return results
            if self.on_progress is not None:
                for payload in progress:
                    self.on_progress(payload)

    def give_up(self) -> None:
        """Ask the ranks to return, or end them, after `run` was left early. Leaves no call open."""
        monitor, cancel = self.monitor, encode({"kind": "cancel", "id": self.call_id})

        def settled() -> bool:
            return monitor.loss is not None or all(rank.reply for rank in monitor.ranks)

        quiet = False
        try:
            for rank in monitor.ranks:
                self._send(rank, cancel)
            with monitor.condition:
                quiet = monitor.condition.wait_for(settled, CANCEL_SECONDS)
        finally:
            if not quiet:
                reason = "the call was cancelled and did not return in time, so it was ended"
                with monitor.condition:
                    monitor.told = True
                    monitor.lose(Loss("lost", reason))

    def _send(self, rank: RankHandle, frame: bytes) -> None:
        if not rank.send(frame):
            reason = "it did not take a message; the process is stuck or suspended"
            with self.monitor.condition:
                self.monitor.lose(Loss("stalled", reason, rank.rank), dump=True)

    def _outcome(self) -> list[Any] | None:
        monitor = self.monitor
        replies = [rank.reply for rank in monitor.ranks if rank.reply is not None]
        failed = [rank for rank in monitor.ranks if rank.reply and rank.reply["kind"] == "failed"]
        complete = len(replies) == len(monitor.ranks)
        if complete and not failed:
            return [reply["value"] for reply in replies]
        # A lost rank is the likelier cause of another's failure (a collective that broke off).
        if monitor.loss is not None:
            raise loss_error(monitor, self.where)
        if failed:
            first = min(failed, key=lambda rank: rank.replied_at)
            if not complete and time.monotonic() - first.replied_at < STRAGGLER_SECONDS:
                return None
            # Read before the stacks of all ranks follow the error in the logs.
            raised = redact_tree((first.reply or {})["raised"])
            # What people read of it; Prefect stores it with a state.
            raised |= {name: shareable(raised[name]) for name in ("message", "traceback")}
            error = errors.WorkerCallFailed(_at(self.where, first), errors.Raised(**raised))
            if not complete:
                reason = f"rank {first.rank} failed and the others did not return"
                monitor.lose(Loss("lost", reason, first.rank), dump=True)
            raise error
        return None

    def _expire(self) -> NoReturn:
        waiting = [rank.rank for rank in self.monitor.ranks if rank.reply is None]
        others = "" if len(waiting) == 1 else f" Neither did ranks {waiting[1:]}."
        reason = (
            f"it did not finish within its deadline of {self.deadline_seconds:g} s."
            f"{others} Raise the deadline, or look at the stacks in the log to see where it hangs"
        )
        self.monitor.lose(Loss("deadline", reason, waiting[0]), dump=True)
        raise loss_error(self.monitor, self.where)


def loss_error(monitor: Monitor, where: errors.Where) -> errors.WorkerError:
    """Build the error for a group that is lost. Call with the condition held."""
    loss = monitor.loss
    assert loss is not None
    monitor.told = True
    rank = None if loss.rank is None else monitor.ranks[loss.rank]
    if loss.kind != "lost" and rank is not None:
        # The rank writes its stacks to the log before it ends; wait, so that the tail shows them.
        monitor.condition.wait_for(lambda: rank.exit_code is not None, _DUMP_SECONDS)
    where = where if rank is None else _at(where, rank)
    said = errors.last_error(where.log_tail) if loss.kind == "lost" and loss.exit_code else ""
    reason = f"{loss.reason}; its log ends with the error: {said}" if said else loss.reason
    return errors.WorkerLost(where, reason, loss.kind, loss.exit_code, loss.out_of_memory)


def _at(where: errors.Where, rank: RankHandle) -> errors.Where:
    return replace(where, rank=rank.rank, log_path=str(rank.log.path), log_tail=rank.log.tail())


Rule = Literal["sum", "max", "min", "mean", "std"]
"""Rule that makes one metric of those of several ranks.

`mean`: weighted by the ranks' weights. `std`: the population standard deviation of all ranks'
things together; the metric of the same name with `mean` in place of `std` must be there too.
Ranks without weight have no part in `mean`, `std`, `min` and those of `max` that they do not name.
"""


def merge_results(
    results: Sequence[Mapping[str, Any]], rules: Mapping[str, Rule]
) -> dict[str, Any]:
    """All shards in rank order, and the metrics merged by their rules. A single rank's are returned
    as they are. Raises `ValueError` for a metric without a rule."""
    shards = [shard for result in results for shard in result.get("shards", ())]
    if len(results) == 1:
        return {"shards": shards, "metrics": dict(results[0]["metrics"])}
    names = dict.fromkeys(name for result in results for name in result["metrics"])
    unruled = sorted(set(names) - set(rules))
    if unruled:
        raise ValueError(f"say how the metrics {unruled} of several ranks are merged: add rules")
    return {"shards": shards, "metrics": {name: _merged(name, rules, results) for name in names}}


def same_results(
    results: Sequence[Mapping[str, Any]], agreed: Sequence[str], rules: Mapping[str, Rule] = {}
) -> dict[str, Any]:
    """The first rank's result; its shards, if it has any, are those of all ranks in their order,
    and metrics that have rules are merged by them.

    For ranks that do one thing together and report what is true of all of them. Raises
    `ValueError` when they do not return the same under the names `agreed`.
    """
    for name in agreed:
        values = [result[name] for result in results]
        if any(value != values[0] for value in values):
            raise ValueError(f"the ranks of one group returned different {name}: {values}")
    together = dict(results[0])
    if "shards" in together:
        together["shards"] = [shard for result in results for shard in result["shards"]]
    if metrics := together.get("metrics"):
        merged = {name: _merged(name, rules, results) for name in rules if name in metrics}
        together["metrics"] = {**metrics, **merged}
    return together


def _merged(name: str, rules: Mapping[str, Rule], results: Sequence[Mapping[str, Any]]) -> float:
    having = [result for result in results if name in result["metrics"]]
    values = [float(result["metrics"][name]) for result in having]
    rule = rules[name]
    if rule == "sum":
        return math.fsum(values)
    if rule == "max":
        return max(values)
    if rule == "min":
        return min(values)
    weights = [float(result["weight"]) for result in having]
    total = math.fsum(weights)
    if not total:
        return values[0]
    if rule == "mean":
        return _weighted(values, weights)
    means = [float(result["metrics"][name.removesuffix("std") + "mean"]) for result in having]
    center = _weighted(means, weights)
    squares = [std**2 + (mean - center) ** 2 for std, mean in zip(values, means, strict=True)]
    return math.sqrt(_weighted(squares, weights))


def _weighted(values: Sequence[float], weights: Sequence[float]) -> float:
    pairs = zip(values, weights, strict=True)
    return math.fsum(value * weight for value, weight in pairs) / math.fsum(weights)


_CHUNK = 1 << 18


@dataclass(frozen=True)
class Loss:
    """The reason why a group can take no more calls; `rank` is None when no single rank did it."""

    kind: LossKind
    reason: str
    rank: int | None = None
    exit_code: int | None = None
    out_of_memory: bool = False


class Monitor(threading.Thread):
    """Reads what ranks and supervisors send; all it writes is guarded by `condition`.

    `loss` is the first reason why it is unusable, `told` whether a call has raised it. `call_id`
    and `progress` belong to the call under way. `finished`: set when no process of it is left.
    """

    def __init__(
        self, ranks: list[RankHandle], condition: threading.Condition, timeout_seconds: float
    ) -> None:
        super().__init__(name="earl-worker-monitor", daemon=True)
        self.ranks = ranks
        self.loss: Loss | None = None
        self.told = False
        self.closing = False
        self.call_id = 0
        self.progress: deque[dict[str, Any]] = deque()
        self.finished = threading.Event()
        self.condition = condition
        self._timeout = timeout_seconds
        self._selector = selectors.DefaultSelector()
        for rank in ranks:
            self._selector.register(
                rank.process.control, selectors.EVENT_READ, (rank, self._on_control)
            )
            self._selector.register(
                rank.process.channel, selectors.EVENT_READ, (rank, self._on_channel)
            )

    def run(self) -> None:
        tick = min(1.0, self._timeout / 4)
        looked = time.monotonic()
        while any(rank.supervised for rank in self.ranks):
            events = self._selector.select(tick)
            now = time.monotonic()
            if now - looked > self._timeout / 2:
                # It was the controller that stood still; give the ranks time to be heard again.
                for rank in self.ranks:
                    rank.last_sign = now
            looked = now
            with self.condition:
                for key, _ in events:
                    rank, handler = key.data
                    self._receive(rank, key.fileobj, handler)
                self._check_heartbeats(now)
                self.condition.notify_all()
        self._selector.close()
        for rank in self.ranks:
            if rank.exit_code is None:
                rank.process.end(rank.pid)
        self.finished.set()
        with self.condition:
            self.condition.notify_all()

    def lose(self, loss: Loss, dump: bool = False) -> None:
        """Mark the group unusable and have every rank ended. Call with the condition held."""
        if self.loss is None:
            self.loss = loss
            logger.info("worker group ended: %s", loss.reason)
            self.end(dump)

    def end(self, dump: bool = False) -> None:
        """Have the supervisors end every rank. Call with the condition held."""
        for rank in self.ranks:
            rank.end(ENDING_GRACE_SECONDS, dump)

    def _receive(self, rank: RankHandle, sock: Any, handler: Any) -> None:
        try:
            data = os.read(sock.fileno(), _CHUNK)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(sock)
        try:
            handler(rank, data)
        except (WireError, KeyError, TypeError, ValueError) as error:
            self.lose(Loss("lost", f"it sent a message that makes no sense: {error}", rank.rank))

    def _on_channel(self, rank: RankHandle, data: bytes) -> None:
        for message in rank.frames.feed(data):
            rank.last_sign = time.monotonic()
            if "memory" in message:
                rank.memory = MemoryUse(**message["memory"])
            kind = message["kind"]
            if kind == "heartbeat" or message["id"] != self.call_id:
                continue
            if kind == "progress":
                self.progress.append({"rank": rank.rank, **message["payload"]})
            else:
                rank.reply, rank.replied_at = message, rank.last_sign

    def _on_control(self, rank: RankHandle, data: bytes) -> None:
        if not data:
            rank.supervised = False
            if rank.exit_code is None:
                self.lose(Loss("lost", rank.process.lost(), rank.rank))
            return
        for message in rank.events.feed(data):
            if message["event"] == "started":
                rank.pid = int(message["pid"])
            else:
                self._on_exit(rank, int(message["code"]), bool(message["out_of_memory"]))

    def _on_exit(self, rank: RankHandle, code: int, out_of_memory: bool) -> None:
        rank.exit_code, rank.out_of_memory = code, out_of_memory
        if not self.closing:
            reason = describe_exit(code, out_of_memory)
            self.lose(Loss("lost", reason, rank.rank, code, out_of_memory))
        elif self.loss is None:
            # Its siblings may still be closing in peace, so nobody is ended for this.
            self.loss = Loss("lost", "the group was stopped", rank.rank, code)

    def _check_heartbeats(self, now: float) -> None:
        for rank in self.ranks:
            silent = now - rank.last_sign
            if self.loss is None and rank.exit_code is None and silent > self._timeout:
                reason = f"no heartbeat for {silent:.0f} s; the process is stuck or suspended"
                self.lose(Loss("stalled", reason, rank.rank), dump=True)
