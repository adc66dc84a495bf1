"""The thread that listens to a group's ranks, so that a loss is known at once, call or no call."""

from __future__ import annotations

import logging
import os
import selectors
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from earl_core.cluster.errors import LossKind, describe_exit
from earl_core.cluster.rank_handle import MemoryUse, RankHandle
from earl_core.system.frames import WireError
from earl_core.system.processes import ENDING_GRACE_SECONDS

logger = logging.getLogger(__name__)

_CHUNK = 1 << 18


@dataclass(frozen=True)
class Loss:
    """Why a group can take no more calls; `rank` is None when it is no single rank's doing."""

    kind: LossKind
    reason: str
    rank: int | None = None
    exit_code: int | None = None
    out_of_memory: bool = False


class Monitor(threading.Thread):
    """Reads what ranks and supervisors send; all it writes is guarded by `condition`.

    `loss` is the first reason why the group is unusable. `call_id` and `progress` belong to the
    call under way. `finished` is set when no process of the group is left.
    """

    def __init__(
        self, ranks: list[RankHandle], condition: threading.Condition, timeout_seconds: float
    ) -> None:
        super().__init__(name="earl-worker-monitor", daemon=True)
        self.ranks = ranks
        self.loss: Loss | None = None
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
