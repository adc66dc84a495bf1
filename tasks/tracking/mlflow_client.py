"""One MLflow run, synchronously: every method either did it or raises.

Nothing global of MLflow is touched (no tracking URI, no active run), so that several runs may
live in one process. MLflow itself is imported by `open_mlflow_run`, which is slow.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit, urlunsplit

from earl_core.config import ConfigError, RunConfig
from earl_core.secrets import (
    learn_url,
    redact,
    redact_tree,
    resolve,
    shareable,
    shareable_names,
    shareable_tree,
)
from earl_core.system.files import refuse_network
from tasks.tracking.database import LOCKED_SECONDS, first_use, sqlite_path
from tasks.tracking.inputs import PlayedInput
from tasks.tracking.metric_catalogue import stored_name
from tasks.tracking.served import pages_of, served_address, trust_server_of
from tasks.tracking.traces import EpisodeTrace


def default_uri(config: RunConfig) -> str:
    """`tracking.uri`, else MLFLOW_TRACKING_URI, else the server of `earl up` if it lives, else the
    SQLite database beside the runs, which is that server's too.

    A reference is resolved; what lets in is hidden from now on. Raises `ConfigError`.
    """
    given = resolve(config.tracking.uri) or os.environ.get("MLFLOW_TRACKING_URI")
    given = served_address(config.runs_directory, given) or given
    learn_url(given or "")
    return given or f"sqlite:///{default_database(config.runs_directory)}"


def default_database(runs_directory: str | Path) -> Path:
    """The SQLite file of runs that are tracked nowhere else. Raises `ConfigError` for a place that
    no URL of a database can name."""
    path = Path(runs_directory).resolve() / "mlflow.db"
    if "?" in str(path):
        raise ConfigError(
            f"{path.parent} has a `?` in its path, at which the URL of a database ends",
            remedy="set runs_directory to another folder, or rename this one",
        )
    return path


def without_login(uri: str) -> str:
    """A URI as it may be shown, stored and opened in a browser: without user, password or key, and
    that of the pages where programs have another one."""
    if (pages := pages_of(uri)) is not None:
        return pages
    if sqlite_path(uri) is None and "://" in uri:
        parts = urlsplit(uri)
        uri = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    return redact(uri)


def check_tracker(config: RunConfig) -> None:
    """Raise `ConfigError` for a tracker that would lose what it is given."""
    if config.tracking.enabled and (database := sqlite_path(default_uri(config))) is not None:
        refuse_network(
            database,
            "start an MLflow server and set tracking.uri to its URL, or set tracking.enabled=false",
        )


T = TypeVar("T")

METRICS_PER_CALL = 1000
"""So many its servers take at once."""
_KEY_LIMIT = 250
_PARAMETER_LIMIT = 6000
_TAG_LIMIT = 8000
_DESCRIPTION = "mlflow.note.content"
_WRITTEN = "earl.note"
"""A digest of the description that we wrote last."""
_TABLES = "mlflow.loggedArtifacts"
_PARENT = "mlflow.parentRunId"
_CHILD = "earl.evaluation"
_KIND = {"mlflow.experimentKind": "custom_model_development"}
"""Opens the experiment on its runs and their curves."""

_ENVIRONMENT = {
    # A server that hangs is noticed after one such timeout; MLflow's own retries take minutes.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0",
    "MLFLOW_ARTIFACT_UPLOAD_DOWNLOAD_TIMEOUT": "15",
    "MLFLOW_ENABLE_ASYNC_TRACE_LOGGING": "false",
    "MLFLOW_ASYNC_TRACE_LOGGING_RETRY_TIMEOUT": "5",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # Failures are raised to us and told once; MLflow's own lines would tear the display.
    "MLFLOW_LOGGING_LEVEL": "ERROR",
}


class Numbers(NamedTuple):
    """The metrics of one step. seconds: Unix time."""

    step: int
    metrics: Mapping[str, Any]
    seconds: float

    def finite(self) -> dict[str, float]:
        """Numbers that MLflow can store, under names that it takes, and that it may have."""
        return {
            stored_name(name): float(value)
            for name, value in shareable_names(self.metrics).items()
            if isinstance(value, int | float) and math.isfinite(value)
        }


def open_mlflow_run(uri: str, experiment: str, name: str, uid: str, known: str | None) -> MlflowRun:
    """Find this run in MLflow or create it; the experiment too. Its status becomes RUNNING.

    known: the MLflow run id of an earlier attempt. A run of the same uid is found without it, so
    that a creation whose answer was lost is not repeated. Raises `ImportError` without MLflow and
    `MlflowException` when the tracker fails.
    """
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    trust_server_of(uri)
    from mlflow import MlflowClient

    with first_use(uri):
        client = patient(lambda: MlflowClient(tracking_uri=uri))
        run = _find(client, known, uid) if known else None
        if run is None:
            place = patient(lambda: _experiment(client, uri, experiment))
            run = _find_by_tag(client, place, "earl.uid", uid) or patient(
                lambda: client.create_run(place, run_name=name, tags={"earl.uid": uid})
            )
    patient(lambda: client.update_run(run.info.run_id, status="RUNNING"))
    return MlflowRun(client, uri, run.info.run_id, run.info.experiment_id)


class MlflowRun:
    """Made by `open_mlflow_run`. Methods raise `MlflowException` when the tracker fails."""

    def __init__(self, client: Any, uri: str, run_id: str, experiment_id: str) -> None:
        self.client = client
        self.uri = uri
        self.run_id = run_id
        self.experiment_id = experiment_id

    def alive(self) -> bool:
        """Tell whether the tracker answers and still knows this run."""
        try:
            self.client.get_run(self.run_id)
        except Exception:  # MLflow raises many kinds for a server that is away
            return False
        return True

    def describe(self, parameters: Mapping[str, str], tags: Mapping[str, str]) -> dict[str, str]:
        """Set tags and parameters; the tags that were there before. MLflow's parameters never
        change: a setting that did since the run began becomes a tag `changed.<key>`."""
        from mlflow.entities import Param

        cut = {
            key[:_KEY_LIMIT]: shareable(value)[:_PARAMETER_LIMIT]
            for key, value in shareable_names(parameters).items()
        }
        found = patient(lambda: self.client.get_run(self.run_id)).data
        there = found.params
        new = [Param(key, value) for key, value in cut.items() if key not in there]
        changed = {
            f"changed.{key}": value
            for key, value in cut.items()
            if key in there and there[key] != value
        }
        self.set_tags({**tags, **changed})
        patient(lambda: self.client.log_batch(self.run_id, params=new))
        return dict(found.tags)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags in as few calls as MLflow allows."""
        from mlflow.entities import RunTag

        rows = [RunTag(key[:_KEY_LIMIT], redact(value)[:_TAG_LIMIT]) for key, value in tags.items()]
        patient(lambda: self.client.log_batch(self.run_id, tags=rows))

    def describe_in_words(self, text: str) -> None:
        """Replace the text on top of the run's page, unless somebody else wrote the one there."""
        there = patient(lambda: self.client.get_run(self.run_id)).data.tags
        text = shareable(text)[:_TAG_LIMIT]
        if there.get(_DESCRIPTION) and there.get(_WRITTEN) != _mark(there[_DESCRIPTION]):
            return
        self.set_tags({_DESCRIPTION: text, _WRITTEN: _mark(text)})

    def log_numbers(self, steps: Sequence[Numbers]) -> None:
        """All metrics of these steps; MLflow makes as many calls as they need. Sending the same
        step twice with the same time changes nothing."""
        from mlflow.entities import Metric

        rows = [
            Metric(name, value, int(numbers.seconds * 1000), numbers.step)
            for numbers in steps
            for name, value in numbers.finite().items()
        ]
        patient(lambda: self.client.log_batch(self.run_id, metrics=rows))

    def log_text(self, text: str, path: str) -> None:
        """Store an artifact, replacing the one at this path."""
        patient(lambda: self.client.log_text(self.run_id, redact(text), path))

    def log_table(self, rows: Sequence[Mapping[str, Any]], path: str) -> None:
        """Store rows as a table that MLflow's pages show, replacing the one at this path.
        `MlflowClient.log_table` would add them to those that are there, twice if sent twice."""
        columns = list(dict.fromkeys(name for row in rows for name in shareable_names(row)))
        data = [[row.get(name, "") for name in columns] for row in rows]
        self.log_text(json.dumps({"columns": columns, "data": shareable_tree(data)}), path)
        there = patient(lambda: self.client.get_run(self.run_id)).data.tags
        tables = json.loads(there.get(_TABLES, "[]"))
        if (table := {"path": path, "type": "table"}) not in tables:
            self.set_tags({_TABLES: json.dumps([*tables, table])})

    def log_trace(self, trace: EpisodeTrace) -> None:
        """Store a trace linked to this run: all its spans in one call, then its summary."""
        from mlflow.entities import Span, TraceInfo, TraceLocation, TraceState
        from mlflow.tracing.client import TracingClient

        client = TracingClient(self.uri)
        spans = [Span.from_dict(redact_tree(span)) for span in trace.spans]
        patient(lambda: client.log_spans(self.experiment_id, spans))
        info = TraceInfo(
            trace_id=trace.trace_id,
            trace_location=TraceLocation.from_experiment_id(self.experiment_id),
            request_time=trace.start_ns // 1_000_000,
            execution_duration=(trace.end_ns - trace.start_ns) // 1_000_000,
            state=TraceState.OK,
            request_preview=redact(trace.request)[:1000],
            response_preview=redact(trace.response)[:1000],
            trace_metadata={
                "mlflow.sourceRun": self.run_id,
                "mlflow.trace_schema.version": "3",
                "mlflow.trace.tokenUsage": json.dumps(trace.tokens),
            },
            tags={**trace.tags, "mlflow.traceName": trace.name},
        )
        patient(lambda: client.start_trace(info))

    def log_inputs(self, played: Iterable[PlayedInput]) -> None:
        """Store what the run plays as its data sets; twice is once."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        found = [
            DatasetInput(
                Dataset(each.name, each.digest, "earl", redact(each.source)),
                [InputTag("mlflow.data.context", each.context)],
            )
            for each in played
        ]
        patient(lambda: self.client.log_inputs(self.run_id, found))

    def nested(self, key: str, name: str) -> MlflowRun:
        """The child run of this key; made once."""
        child = _find_by_tag(self.client, self.experiment_id, _CHILD, key, self.run_id)
        if child is None:
            tags = {_PARENT: self.run_id, _CHILD: key}
            child = patient(
                lambda: self.client.create_run(self.experiment_id, run_name=name, tags=tags)
            )
        return MlflowRun(self.client, self.uri, child.info.run_id, self.experiment_id)

    def end(self, status: str) -> None:
        """Set the final status."""
        patient(lambda: self.client.set_terminated(self.run_id, status))


def _mark(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _find(client: Any, run_id: str, uid: str) -> Any | None:
    """The run of this id if it is there, not deleted, and ours."""
    from mlflow.exceptions import MlflowException

    try:
        run = patient(lambda: client.get_run(run_id))
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    ours = run.info.lifecycle_stage == "active" and run.data.tags.get("earl.uid") == uid
    return run if ours else None


def _find_by_tag(
    client: Any, experiment_id: str, tag: str, value: str, parent: str | None = None
) -> Any | None:
    clauses = [f"tags.`{tag}` = '{value}'"]
    if parent is not None:
        clauses.append(f"tags.`{_PARENT}` = '{parent}'")
    found = patient(
        lambda: client.search_runs(
            [experiment_id], filter_string=" and ".join(clauses), max_results=1
        )
    )
    return found[0] if found else None


def _experiment(client: Any, uri: str, name: str) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name, _artifacts(uri, name), _KIND))
        except MlflowException:
            # Another run created it in between.
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    if found.lifecycle_stage != "active":
        raise MlflowException(
            f"the experiment {name!r} was deleted: restore it with `mlflow experiments restore "
            f"--experiment-id {found.experiment_id}` or choose another tracking.experiment"
        )
    return str(found.experiment_id)


def _artifacts(uri: str, experiment: str) -> str | None:
    """Beside an SQLite database; a server decides itself."""
    database = sqlite_path(uri)
    if database is None:
        return None
    return (database.parent / "mlartifacts" / re.sub(r"[^\w.-]", "_", experiment)).as_uri()


def patient(call: Callable[[], T]) -> T:
    """Make a call; wait out other writers of the same SQLite database."""
    limit = time.monotonic() + LOCKED_SECONDS
    while True:
        try:
            return call()
        except Exception as error:
            if "database is locked" not in str(error) or time.monotonic() > limit:
                raise
            time.sleep(0.2)
