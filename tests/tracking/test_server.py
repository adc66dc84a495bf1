"""A tracking server over HTTP: working, dead, hanging, and back again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.shared import free_port
from tests.tracking.conftest import (
    Runs,
    Server,
    Unsent,
    finish,
    history,
    learn,
    until,
    warnings_in,
)


@pytest.fixture
def paused(server: Server) -> Iterator[Server]:
    server.pause()
    yield server
    server.go_on()


@pytest.mark.usefixtures("patient")
def test_a_run_is_whole_on_a_server(
    runs: Runs, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    run = runs.run()
    tracker = runs.tracker(run)
    for iteration in range(3):
        finish(run, tracker, iteration)
    tracker.close()
    assert tracker.uri == server.uri
    assert (tracker.waiting, tracker.dropped) == (0, 0)
    client = MlflowClient(tracking_uri=server.uri)
    found = client.get_run(tracker.run_id)
    assert found.info.status == "FINISHED"
    assert found.data.params["rollout.group_size"] == "4"
    assert history(server.uri, tracker.run_id) == {0: 0.0, 1: 0.1, 2: 0.2}
    assert {a.path for a in client.list_artifacts(tracker.run_id)} == {
        *("checkpoints", "config.yaml", "metrics.json", "plans")
    }
    traces = client.search_traces(locations=[tracker.experiment_id], run_id=tracker.run_id)
    assert sorted(len(trace.data.spans) for trace in traces) == [7, 7, 7]

    second = runs.tracker(run)
    second.close()
    assert second.run_id == tracker.run_id


@pytest.mark.usefixtures("patient")
def test_a_server_gets_the_paths_and_an_evaluation_is_a_child_once(
    runs: Runs, server: Server, policy: Path
) -> None:
    run = runs.run("served", tracking={"uri": server.uri})
    tracker = runs.tracker(run)
    learn(run, tracker, policy, 0, 0.25)
    tracker.close()
    second = runs.tracker(run)
    learn(run, second, policy, 1, 0.5)
    second.close()
    assert (tracker.dropped, second.dropped) == (0, 0)
    client = MlflowClient(tracking_uri=server.uri)
    version = client.get_model_version_by_alias("served", "best")
    assert version.source == f"runs:/{tracker.run_id}/checkpoints"
    assert (Path(version.tags["path"]) / "config.json").exists()
    assert client.list_artifacts(tracker.run_id, "checkpoints")[0].path == "checkpoints/README.md"
    children = client.search_runs(
        [tracker.experiment_id], f"tags.`mlflow.parentRunId` = '{tracker.run_id}'"
    )
    found = {child.info.run_name: child.data.metrics for child in children}
    assert len(children) == len(found) == 2
    assert found["evaluation after 1 iteration"]["1_learning/return_held_out"] == 0.25
    good = client.search_runs([tracker.experiment_id], "metrics.`1_learning/return_held_out` > 0.4")
    known = {tracker.run_id, *(child.info.run_id for child in children)}
    names = {each.info.run_name for each in good if each.info.run_id in known}
    assert names == {"served", "evaluation after 2 iterations"}

    # All of it again, where the server lost the run.
    client.delete_run(tracker.run_id)
    third = runs.tracker(run)
    third.close()
    assert third.run_id != tracker.run_id
    lost = f"tags.`mlflow.parentRunId` = '{third.run_id}'"
    assert len(client.search_runs([third.experiment_id], lost)) == 2
    assert third.dropped == 0


def test_dead_at_start(runs: Runs, unsent: Unsent, caplog: pytest.LogCaptureFixture) -> None:
    uri = f"http://127.0.0.1:{free_port()}"
    run = runs.run(tracking={"uri": uri})
    with unsent():
        tracker = runs.tracker(run, retry_seconds=0.5)
        finish(run, tracker, 0)
    assert until(lambda: tracker.failing)
    for iteration in range(1, 4):
        finish(run, tracker, iteration)
        time.sleep(0.8)
    with unsent():
        tracker.close()
    assert tracker.run_id is None
    (warning,) = warnings_in(caplog)
    assert warning.name == "earl.tracking"
    assert f"{uri} does not work (nothing listens there)" in warning.getMessage()
    assert "metrics.jsonl" in warning.getMessage()
    assert "tracking.enabled=false" in warning.getMessage()


def test_hanging_at_start(runs: Runs, paused: Server, caplog: pytest.LogCaptureFixture) -> None:
    run = runs.run(tracking={"uri": paused.uri})
    tracker = runs.tracker(run)
    finish(run, tracker, 0)
    # Whoever ends before the first time-out waits for that and no longer.
    started = time.monotonic()
    tracker.close()
    assert time.monotonic() - started < 100
    (warning,) = warnings_in(caplog)
    assert "does not answer in time" in warning.getMessage()
    assert tracker.failing


@pytest.mark.slow
def test_hanging_later_then_back(
    runs: Runs,
    server: Server,
    unsent: Unsent,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = runs.run("hanging", tracking={"uri": server.uri})
    tracker = runs.tracker(run, retry_seconds=0.5)
    finish(run, tracker, 0)
    assert until(lambda: tracker.run_id and not tracker.waiting)
    server.pause()
    try:
        with unsent():
            for iteration in range(1, 4):
                finish(run, tracker, iteration)
        assert until(lambda: tracker.failing)
        assert len(warnings_in(caplog)) == 1
        # Written while nothing was listening, by nobody's queue.
        run.append_metrics(4, {"rollout/return/mean": 0.4})
    finally:
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "120")
        server.go_on()
    assert until(lambda: not tracker.failing and not tracker.waiting)
    finish(run, tracker, 5)
    tracker.close()
    assert history(server.uri, tracker.run_id) == {step: step / 10 for step in range(6)}
    assert len(warnings_in(caplog)) == 1
    assert MlflowClient(server.uri).get_run(tracker.run_id).info.status == "FINISHED"
    assert tracker.dropped == 0


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_dead_later_then_another_attempt_completes_it(
    runs: Runs, server: Server, unsent: Unsent, caplog: pytest.LogCaptureFixture
) -> None:
    run = runs.run("killed", tracking={"uri": server.uri})
    tracker = runs.tracker(run)
    finish(run, tracker, 0)
    assert until(lambda: tracker.run_id and not tracker.waiting)
    server.kill()
    try:
        finish(run, tracker, 1)
        assert until(lambda: tracker.failing)
        finish(run, tracker, 2)
        with unsent():
            tracker.close()
        assert len(warnings_in(caplog)) == 1
    finally:
        server.start()
    assert history(server.uri, tracker.run_id) == {0: 0.0}
    runs.close_run(run)

    again = runs.run("killed", tracking={"uri": server.uri})
    second = runs.tracker(again)
    finish(again, second, 3)
    second.close()
    assert second.run_id == tracker.run_id
    assert history(server.uri, second.run_id) == {0: 0.0, 1: 0.1, 2: 0.2, 3: 0.3}


@pytest.mark.slow
def test_a_server_that_flaps_gets_every_step_once(
    runs: Runs, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    run = runs.run("flapping", tracking={"uri": server.uri, "trace_episodes": 0})
    tracker = runs.tracker(run, retry_seconds=0.5)
    for iteration in range(20):
        finish(run, tracker, iteration)
        if iteration % 10 == 5:
            server.pause()
        if iteration % 10 == 9:
            assert until(lambda: tracker.failing)
            server.go_on()
            assert until(lambda: not tracker.failing and not tracker.waiting)
    tracker.close()
    assert sorted(history(server.uri, tracker.run_id)) == list(range(20))
    assert len(warnings_in(caplog)) == 1
