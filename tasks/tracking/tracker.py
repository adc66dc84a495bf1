"""The tracker: what a run shows in MLflow, sent by a thread of its own.

The flow only puts things into an `Outbox`; it never waits for MLflow. When MLflow is away there is
one warning, and the thread tries again every `retry_seconds`; then it sends what waited, and what
`metrics.jsonl` holds and MLflow lacks.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from earl_core.control.run_controller import Status
from earl_core.run import RunDirectory
from earl_core.secrets import redact
from earl_core.selector import Hardware
from tasks.tracking import details
from tasks.tracking.delivery import Delivery
from tasks.tracking.mlflow_client import METRICS_PER_CALL, Numbers
from tasks.tracking.outbox import Chart, Checkpoint, Item, Outbox, Plan, Trace

logger = logging.getLogger("earl.tracking")

_SLOW_SECONDS = 2.0
_AGAIN_SECONDS = 0.5
_ATTEMPTS = 3
_REASON_LIMIT = 300
_CHART_EVERY = 5
_MEANINGS = {
    "Connection refused": "nothing listens there",
    "Name or service not known": "no such host",
    "timed out": "it does not answer in time",
    "ReadTimeoutError": "it does not answer in time",
}
"""What the usual failures of HTTP clients mean, by a sign in their long texts."""


class _CallError(Exception):
    """A call to MLflow failed, twice if `quick`; the cause is the last failure."""

    def __init__(self, quick: bool) -> None:
        super().__init__("a call to MLflow failed")
        self.quick = quick


class Tracker:
    """Made at the start of a run; returns at once and never raises on behalf of MLflow.

    run: its `record["tracking"]` receives uri, run_id and experiment_id, and gives them back on
    resume. retry_seconds: how long MLflow is left alone after it failed. flush_seconds: how long
    `close` waits for a healthy tracker.
    """

    def __init__(
        self,
        run: RunDirectory,
        hardware: Hardware,
        *,
        retry_seconds: float = 60.0,
        flush_seconds: float = 30.0,
    ) -> None:
        self._run = run
        self._uri = details.default_uri(run.config)
        self._retry_seconds = retry_seconds
        self._flush_seconds = flush_seconds
        self._changed = threading.Condition()
        self._outbox = Outbox()
        self._delivery = Delivery(run, hardware, self._uri)
        self._ids: tuple[str, str] | None = None
        self._closing: Status | None = None
        self._left = False
        self._ended = False
        self._failing = False
        self._warned: set[str] = set()
        self._attempts: dict[int, int] = {}
        self._last_stages = ""
        self._last_reasons: dict[str, str] = {}
        self._thread: threading.Thread | None = None
        if run.config.tracking.enabled:
            self._thread = threading.Thread(target=self._work, name="earl-tracking", daemon=True)
            self._thread.start()

    @property
    def uri(self) -> str:
        """The tracking URI, without credentials."""
        return redact(self._uri)

    @property
    def run_id(self) -> str | None:
        """MLflow's id of this run; None until MLflow answered."""
        return self._ids[0] if self._ids else None

    @property
    def experiment_id(self) -> str | None:
        """MLflow's id of the experiment; None until MLflow answered."""
        return self._ids[1] if self._ids else None

    @property
    def failing(self) -> bool:
        """Whether MLflow is away, as far as is known."""
        return self._failing

    @property
    def waiting(self) -> int:
        """How many items MLflow has not taken yet."""
        return len(self._outbox)

    @property
    def dropped(self) -> int:
        """How many items were given up, because too many waited or MLflow refused them."""
        return self._outbox.dropped

    def iteration_finished(
        self,
        iteration: int,
        metrics: dict[str, float],
        *,
        plan: dict[str, Any],
        examples: list[dict[str, Any]],
        checkpoint: Path | None,
    ) -> None:
        """Queue an iteration's metrics, its plan where it is another, its episodes, checkpoint."""
        items: list[Item] = [Numbers("iteration", iteration, metrics)]
        items += self._changed_plan(iteration, plan)
        last = iteration + 1 >= self._run.config.iterations
        if last or (iteration + 1) % _CHART_EVERY == 0:
            items.append(Chart(iteration))
        if checkpoint is not None:
            items.append(Checkpoint(iteration, checkpoint))
        shown = examples[: self._run.config.tracking.trace_episodes]
        items.extend(Trace(iteration, example) for example in shown)
        self._put(items)

    def _changed_plan(self, iteration: int, plan: dict[str, Any]) -> list[Item]:
        """Reasons differ in every iteration; another stage deployment is what people look for."""
        stages = json.dumps([plan.get("stages"), plan.get("policy")], sort_keys=True, default=str)
        reasons = details.plan_reasons(plan)
        switched = stages != self._last_stages
        if not plan or not (switched or reasons != self._last_reasons):
            return []
        self._last_stages, self._last_reasons = stages, reasons
        return [Plan(iteration, plan, switched)]

    def evaluation_finished(self, iteration: int, metrics: dict[str, float]) -> None:
        """Queue a held-out evaluation's metrics; the step is the iteration."""
        self._put([Numbers("evaluation", iteration, metrics)])

    def close(self, status: Status = "FINISHED") -> None:
        """Set the final status and wait for what is queued, but only for a tracker that works."""
        if self._thread is None:
            return
        with self._changed:
            self._closing = self._closing or status
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._ended or self._failing, timeout=self._flush_seconds
            )
            self._left = True
            unsent = len(self._outbox)
        if unsent:
            logger.info("%d items were not sent to MLflow; a resume sends the metrics.", unsent)

    def _put(self, items: list[Item]) -> None:
        if self._thread is None:
            return
        with self._changed:
            for item in items:
                self._outbox.put(item)
            self._changed.notify_all()

    # The thread

    def _work(self) -> None:
        try:
            while not self._ended and not self._left:
                try:
                    self._send_all()
                except _CallError as failure:
                    self._note_away(failure)
                self._wait()
        except ImportError as error:
            self._fail_for_good(
                f"MLflow cannot be imported ({error}), so this run is not tracked and only "
                f"{self._run.path / 'metrics.jsonl'} has its numbers: install mlflow, or set "
                "tracking.enabled=false"
            )
        except Exception as error:  # a fault here must never reach the run
            logger.debug("tracking stopped", exc_info=True)
            self._fail_for_good(
                f"tracking stopped ({error!r}): the run goes on, and only "
                f"{self._run.path / 'metrics.jsonl'} has its numbers from here on; please report it"
            )
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _wait(self) -> None:
        """Until there is something to do; while MLflow is away, until it is to be tried again."""
        with self._changed:
            if self._failing:
                self._changed.wait_for(
                    lambda: self._closing is not None, timeout=self._retry_seconds
                )
                self._left |= self._closing is not None
            elif not self._ended:
                self._changed.wait_for(
                    lambda: len(self._outbox) > 0 or self._closing is not None or self._left
                )

    def _send_all(self) -> None:
        """Until nothing waits; connects first when needed. Raises `_CallError`."""
        delivery = self._delivery
        if not delivery.connected:
            self._connect()
        while not self._left:
            with self._changed:
                items = self._outbox.head(METRICS_PER_CALL)
                lost, self._outbox.lost_numbers = self._outbox.lost_numbers, False
                closing = self._closing
            if lost:
                self._call(lambda: delivery.restore(self._queued_steps))
            elif items:
                self._send(items)
            elif closing is None:
                return
            else:
                self._call(partial(delivery.end, closing))
                self._ended = True
                return

    def _connect(self) -> None:
        delivery = self._delivery
        self._call(delivery.connect)
        if self._left:
            return
        delivery.record_ids()
        self._ids = (delivery.run_id, delivery.experiment_id)
        self._call(lambda: delivery.restore(self._queued_steps))
        self._guarded(delivery.send_config, [])
        if self._failing:
            logger.info("MLflow at %s answers again and gets what it lacked.", self.uri)
        self._failing = False

    def _queued_steps(self, kind: str) -> set[int]:
        with self._changed:
            return self._outbox.steps(kind)

    def _send(self, items: list[Item]) -> None:
        self._guarded(lambda: self._delivery.deliver(items), items)
        with self._changed:
            self._outbox.remove(items)

    def _guarded(self, call: Callable[[], None], items: Sequence[Item]) -> None:
        """Make a call; give it up if MLflow works but refuses it. Raises `_CallError`."""
        key = id(items[0]) if items else 0
        try:
            self._call(call)
        except _CallError as failure:
            tried = self._attempts[key] = self._attempts.get(key, 0) + 1
            # Connecting worked before each attempt, so after several it is this call's own fault.
            if not (failure.quick and self._delivery.alive()) and tried < _ATTEMPTS:
                raise
            self._refuse(items, failure)
        self._attempts.pop(key, None)

    def _call(self, call: Callable[[], None]) -> None:
        """Make a call, once more if it failed at once: a closed connection, a busy server."""
        for last in (False, True):
            started = time.monotonic()
            try:
                return call()
            except Exception as error:  # MLflow raises many kinds
                if isinstance(error, ImportError) and not self._delivery.connected:
                    raise  # there is no MLflow here, and waiting will not bring it
                quick = time.monotonic() - started < _SLOW_SECONDS
                if last or not quick:
                    raise _CallError(quick) from error
            time.sleep(_AGAIN_SECONDS)
        return None

    def _refuse(self, items: Sequence[Item], failure: _CallError) -> None:
        self._delivery.refuse(items)
        with self._changed:
            self._outbox.dropped += max(len(items), 1)
        kinds = ", ".join(sorted({type(item).__name__.lower() for item in items})) or "config.yaml"
        self._warn(
            "refused",
            f"MLflow at {self.uri} works but refuses {kinds} ({self._reason(failure)}): the run "
            "goes on without it there; its versions of server and client, and access to its "
            "artifact store, are worth a look",
        )

    def _note_away(self, failure: _CallError) -> None:
        self._delivery.disconnect()
        self._warn(
            "away",
            f"MLflow at {self.uri} does not work ({self._reason(failure)}): the run goes on, its "
            f"numbers are in {self._run.path / 'metrics.jsonl'}, and MLflow gets them when it "
            "works again; start it, correct tracking.uri, or set tracking.enabled=false",
        )
        with self._changed:
            self._failing = True
            self._changed.notify_all()

    def _fail_for_good(self, message: str) -> None:
        self._warn("fault", message)
        self._failing = True

    def _warn(self, kind: str, message: str) -> None:
        """One warning a kind and run; more would only say it again."""
        level = logging.INFO if kind in self._warned or self._left else logging.WARNING
        self._warned.add(kind)
        logger.log(level, message)

    def _reason(self, failure: _CallError) -> str:
        text = str(failure.__cause__).strip() or repr(failure.__cause__)
        for sign, meaning in _MEANINGS.items():
            if sign in text:
                return meaning
        line = text.splitlines()[0]
        return redact(line)[:_REASON_LIMIT]
