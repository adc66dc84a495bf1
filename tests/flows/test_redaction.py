"""A run whose rules hide what its environment tells: pages, traces, tables, logs and messages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from mlflow import MlflowClient

from earl_core.run.kept_episodes import read_episodes
from earl_core.secrets import redactor
from flows.cli.comparing import compare_runs
from flows.cli.report import report
from tests.flows.confidential import PERSON, RULES, found_in, unpacked
from tests.flows.runs import Runs

NAME = "confidential"


def found_below(directory: Path) -> dict[str, list[str]]:
    """Secrets by the file that they are in."""
    found = {}
    for path in directory.rglob("*"):
        # The server is still running, and removes files of its own.
        with suppress(FileNotFoundError):
            if path.is_file() and (secrets := found_in(path.read_bytes())):
                found[path.name] = secrets
    return found


@pytest.mark.slow
def test_what_rules_hide_leaves_the_run_by_no_way(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = runs.directory / "rules.yaml"
    rules.write_text(RULES)
    runs.environment["EARL_TEST_REDACTION_KEY"] = "a long key"
    monkeypatch.setenv("EARL_TEST_REDACTION_KEY", "a long key")
    # What this process learns for the pages is not for the next test.
    monkeypatch.setattr(redactor, "_rules", {})
    settings = (
        f"name={NAME}", "environment.name=tests.flows.confidential:Office",
        "environment.options={raising: [0]}", "rollout.max_failed_share=1.0",
        f"tracking.redact={rules}", "tracking.enabled=true", "tracking.trace_episodes=4",
        f"tracking.uri=sqlite:///{runs.directory / 'runs' / 'mlflow.db'}", "evaluation.every=1",
        "evaluation.episodes=4", "reward.retries=0",
        "reward.functions=[{function: 'tests.flows.confidential:judged'}]",
    )  # fmt: skip
    printed = runs.train("iterations=2", *settings, expect=1)
    assert "nobody judges You serve (hidden), (person " in printed
    assert found_in(printed.encode()) == []
    run = runs.run(NAME)
    kept = run / "iterations/000000/episodes.parquet"
    (first, *_) = read_episodes(kept, None)
    assert PERSON in first["turns"][0]["observation"], "the run keeps what was played"
    assert any(f"of {PERSON}" in name for name in runs.metrics(NAME)[0])
    for page in _pages(run):
        assert b"(person " in unpacked(page)
        assert found_in(page) == []
    # The server has other tests' runs, too.
    assert found_below(Path(runs.environment["PREFECT_HOME"])) == {}
    assert found_below(runs.directory / "runs" / "mlartifacts") == {}
    for database in (runs.directory / "runs").glob("mlflow.db*"):
        assert found_in(database.read_bytes()) == []
    client = MlflowClient(tracking_uri=f"sqlite:///{runs.directory / 'runs' / 'mlflow.db'}")
    (experiment,) = client.search_experiments(filter_string="name = 'earl'")
    traces = client.search_traces(locations=[experiment.experiment_id])
    assert len(traces) == 4
    shown = json.dumps([trace.to_dict() for trace in traces])
    assert found_in(shown.encode()) == []
    assert "(turn dropped)" in shown
    assert "(person " in shown


def _pages(run: Path) -> Iterator[bytes]:
    """The report of the run, and its comparison with a copy of it."""
    other, page = run.parent / "copy", run.parent / "page.html"
    shutil.copytree(run, other)
    report(str(run), "", page, 100)
    yield page.read_bytes()
    compare_runs([str(run), str(other)], "", page, prompts=1)
    yield page.read_bytes()
