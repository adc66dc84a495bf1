"""What a tracker refuses, locks or never got, and episodes that are damaged."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.tracking.conftest import Runs, Unsent, finish, history, until, warnings_in


def test_a_refused_value_loses_only_itself(runs: Runs, caplog: pytest.LogCaptureFixture) -> None:
    run = runs.run()
    (runs.path / "runs" / "mlartifacts").write_text("a file where the artifacts should be")
    tracker = runs.tracker(run)
    for iteration in range(2):
        finish(run, tracker, iteration)
    tracker.close()
    assert not tracker.failing
    assert history(tracker.uri, tracker.run_id) == {0: 0.0, 1: 0.1}
    assert tracker.dropped == 4  # config.yaml, the plan, metrics.json, and the page of checkpoints
    (warning,) = warnings_in(caplog)
    assert "refuses config.yaml" in warning.getMessage()


def test_without_mlflow_the_run_goes_on(
    runs: Runs, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    run = runs.run()
    tracker = runs.tracker(run)
    finish(run, tracker, 0)
    tracker.close()
    (warning,) = warnings_in(caplog)
    assert "install mlflow, or set tracking.enabled=false" in warning.getMessage()


def test_a_locked_database_is_waited_for(
    runs: Runs, unsent: Unsent, caplog: pytest.LogCaptureFixture
) -> None:
    run = runs.run()
    tracker = runs.tracker(run)
    finish(run, tracker, 0)
    assert until(lambda: not tracker.waiting)
    other = sqlite3.connect(runs.path / "runs" / "mlflow.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with unsent():
        finish(run, tracker, 1)
    time.sleep(6.0)  # longer than SQLite's own patience
    other.execute("ROLLBACK")
    other.close()
    tracker.close()
    assert history(tracker.uri, tracker.run_id) == {0: 0.0, 1: 0.1}
    assert not warnings_in(caplog)


def test_all_that_was_never_sent_is_sent_from_the_directory(runs: Runs) -> None:
    run = runs.run(iterations=30)
    for iteration in range(30):
        finish(run, None, iteration)
    tracker = runs.tracker(run)
    tracker.close()
    assert sorted(history(tracker.uri, tracker.run_id)) == list(range(30))
    client = MlflowClient(tracking_uri=tracker.uri)
    traces = client.search_traces(locations=[tracker.experiment_id], run_id=tracker.run_id)
    assert len(traces) == 30
    assert tracker.dropped == 0


def test_damaged_episodes_are_not_traced(runs: Runs, caplog: pytest.LogCaptureFixture) -> None:
    run = runs.run()
    finish(run, None, 0)
    finish(run, None, 1)
    run.episodes_path(0).write_bytes(b"PAR1")
    tracker = runs.tracker(run)
    tracker.close()
    (warning,) = warnings_in(caplog)
    assert "iteration 0 is not traced" in warning.getMessage()
    client = MlflowClient(tracking_uri=tracker.uri)
    traces = client.search_traces(locations=[tracker.experiment_id], run_id=tracker.run_id)
    assert [trace.info.tags["earl.iteration"] for trace in traces] == ["1"]
    assert history(tracker.uri, tracker.run_id) == {0: 0.0, 1: 0.1}


SCRIPT = """
    import sys
    from pathlib import Path
    from tests.tracking.conftest import Runs, finish

    def main() -> None:
        runs = Runs(Path(sys.argv[1]))
        run = runs.run(sys.argv[2])
        tracker = runs.tracker(run)
        for iteration in range(8):
            finish(run, tracker, iteration)
        tracker.close()
        assert tracker.waiting == 0 and tracker.dropped == 0 and not tracker.failing
        heavy = {"torch", "transformers", "vllm"} & set(sys.modules)
        assert not heavy, heavy
        print(tracker.run_id)

    main()
"""


def test_two_runs_share_a_database_from_its_first_moment(tmp_path: Path) -> None:
    """Also: tracking imports no torch, writes nothing into the working directory, says nothing."""
    (tmp_path / "work").mkdir()
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    environment.pop("MLFLOW_TRACKING_URI", None)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path), name],
            cwd=tmp_path / "work",
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "two")
    ]
    uri = f"sqlite:///{(tmp_path / 'runs' / 'mlflow.db').resolve()}"
    for process in processes:
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        assert errors == ""
        assert sorted(history(uri, output.strip())) == list(range(8))
    assert list((tmp_path / "work").iterdir()) == []
