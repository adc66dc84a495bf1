"""A run in the SQLite database beside the runs."""

from __future__ import annotations

import json
import math
import shlex
import threading
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from mlflow import MlflowClient

from earl_core.deployment.stages import STAGES
from earl_core.run.kept_episodes import read_episodes
from earl_core.trajectory.samples import Episode, Sample, VersionSpan
from tasks.tracking.tracker import Tracker
from tests.kept import game
from tests.tracking.conftest import Runs, evaluate, finish, history, plan, until, warnings_in


def artifact(client: MlflowClient, run_id: str, path: str) -> str:
    root = Path(unquote(urlsplit(client.get_run(run_id).info.artifact_uri).path))
    return (root / path).read_text()


def test_a_run_is_whole_in_mlflow(runs: Runs, caplog: pytest.LogCaptureFixture) -> None:
    run = runs.run()
    older = {"name": "older", "digest": "1" * 32}
    run.update_record(
        ancestor={"name": "old", "iteration": 2, "digest": "0" * 32, "ancestors": [older]}
    )
    tracker = runs.tracker(run)
    for iteration in range(3):
        finish(run, tracker, iteration, entropy=1.5, nothing=math.nan)
    evaluate(run, 0)
    evaluate(run, 3, **{"outcome/win/share": 0.5, "return/mean": 0.25})
    tracker.changed()
    tracker.close()

    uri = f"sqlite:///{(runs.path / 'runs' / 'mlflow.db').resolve()}"
    assert tracker.uri == uri
    client = MlflowClient(tracking_uri=uri)
    found = client.get_run(tracker.run_id)
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "first"
    assert client.get_experiment(tracker.experiment_id).name == "earl"
    parameters, tags = found.data.params, found.data.tags
    assert parameters["rollout.group_size"] == "4"
    assert parameters["environment.name"] == "tictactoe"
    assert tags["earl.uid"] == run.uid
    assert tags["hardware.cpu_cores"] == "2"
    assert tags["earl.ancestor"] == "old@2"
    assert tags["earl.ancestor.digest"] == "0" * 32
    assert tags["earl.ancestors"] == "old@2, older"
    assert {"version.mlflow", "version.torch", "version.python"} <= set(tags)
    assert tags["checkpoint"] == str(run.checkpoint_path(2).resolve())
    assert tags["plan.rollout"] == "the only candidate"
    note = tags["mlflow.note.content"]
    assert "Training, 3 of 3 done: return +0.000 → return +0.200" in note
    assert "→ return +0.250, win 50 %" in note
    assert f"`earl resume {shlex.quote(str(run.path.resolve()))}`" in note
    assert history(uri, tracker.run_id) == {0: 0.0, 1: 0.1, 2: 0.2}
    assert history(uri, tracker.run_id, "entropy") == {0: 1.5, 1: 1.5, 2: 1.5}
    assert history(uri, tracker.run_id, "nothing") == {}
    assert history(uri, tracker.run_id, "1_learning/win_rate_held_out") == {3: 0.5}
    assert_stored(client, tracker, tags)
    (played,) = found.inputs.dataset_inputs
    assert played.dataset.name == "tictactoe"
    assert json.loads(played.dataset.source)["options"] == {}
    assert run.record["tracking"] == {
        "uri": uri,
        "run_id": tracker.run_id,
        "experiment_id": tracker.experiment_id,
    }
    assert json.loads((run.path / "run.json").read_text())["tracking"]["run_id"] == tracker.run_id
    assert (runs.path / "runs" / "mlartifacts" / "earl").is_dir()
    assert not warnings_in(caplog)
    assert tracker.dropped == 0
    assert tracker.waiting == 0


def assert_stored(client: MlflowClient, tracker: Tracker, tags: dict[str, str]) -> None:
    """Tables, configuration and plans of the run."""
    table = json.loads(artifact(client, tracker.run_id, "evaluation/results.json"))
    assert [row[:2] for row in table["data"]] == [[0, "sums"], [3, "held-out"], [3, "sums"]]
    # Their order depends on when the tracker woke.
    logged = json.loads(tags["mlflow.loggedArtifacts"])
    assert sorted(table["path"] for table in logged) == ["evaluation/results.json", "metrics.json"]
    assert {table["type"] for table in logged} == {"table"}
    meanings = json.loads(artifact(client, tracker.run_id, "metrics.json"))
    assert ["1_learning/return", ""] in [row[:2] for row in meanings["data"]]
    assert yaml.safe_load(artifact(client, tracker.run_id, "config.yaml"))["name"] == "first"
    assert json.loads(artifact(client, tracker.run_id, "plans/000000.json")) == plan()
    assert client.list_artifacts(tracker.run_id, "plans")[1:] == []


def test_a_plan_is_stored_when_its_layouts_change_and_its_reasons_always(runs: Runs) -> None:
    run = runs.run()
    tracker = runs.tracker(run)
    wider = {**plan("c"), "stages": {"rollout": {"replicas": 2}}}
    for iteration, chosen in enumerate([plan("a"), plan("b"), wider, {**wider, "iteration": 3}]):
        finish(run, tracker, iteration, chosen)
    tracker.close()
    client = MlflowClient(tracking_uri=tracker.uri)
    stored = [file.path for file in client.list_artifacts(tracker.run_id, "plans")]
    assert stored == ["plans/000000.json", "plans/000002.json"]
    assert client.get_run(tracker.run_id).data.tags["plan.rollout"] == "c"


def test_episodes_are_traces_linked_to_the_run(runs: Runs) -> None:
    run = runs.run()
    tracker = runs.tracker(run)
    mismatch = {"update/mismatch_mean": 0.5, "update/mismatch_kl": 0.25}
    finish(run, tracker, 7, episodes=[game(4), game(5, "loss", samples=2), game(6)], **mismatch)
    finish(run, tracker, 8, episodes=[Episode(7, 0, 0, [Sample()], "done")])
    tracker.close()
    client = MlflowClient(tracking_uri=tracker.uri)
    found = client.search_traces(locations=[tracker.experiment_id], run_id=tracker.run_id)
    assert tracker.dropped == 0
    seven = {t.info.tags["earl.episode"]: t for t in found if t.info.tags["earl.iteration"] == "7"}
    assert sorted(seven) == ["4", "5"], "trace_episodes is 2"
    assert seven["5"].info.tags["earl.outcome"] == "loss"
    assert seven["4"].info.execution_duration == 7, "a millisecond a token"
    assert len(seven["5"].data.spans) == 7
    assert len(found) == 3
    spans = {span.span_id: span for span in seven["4"].data.spans}

    def path(span: Any) -> str:
        parent = spans[span.parent_id] if span.parent_id else None
        return f"{path(parent)}/{span.name}" if parent else span.name

    assert sorted(path(span) for span in spans.values()) == [
        "episode 4",
        "episode 4/turn 1",
        "episode 4/turn 1/environment",
        "episode 4/turn 1/generation",
        "episode 4/turn 2",
        "episode 4/turn 2/environment",
        "episode 4/turn 2/generation",
    ]
    (turn,) = [span for span in spans.values() if span.name == "turn 2"]
    assert turn.inputs == {"observation": "board 2"}
    assert turn.outputs == {"answer": "[9]", "reward": 1.0}
    answer = next(
        s for s in spans.values() if s.name == "generation" and s.parent_id == turn.span_id
    )
    assert answer.span_type == "CHAT_MODEL"
    usage = {"input_tokens": 6, "output_tokens": 4, "total_tokens": 10}
    assert answer.attributes["mlflow.chat.tokenUsage"] == usage
    assert answer.attributes["logprob_mean"] == -0.5
    assert seven["4"].info.token_usage["output_tokens"] == 7
    (root,) = [span for span in spans.values() if span.parent_id is None]
    assert root.outputs["return"] == 1.0
    assert root.outputs["mismatch_of_iteration"] == {"mean": 0.5, "kl": 0.25}
    assert {span.span_type for span in spans.values()} == {"AGENT", "CHAIN", "CHAT_MODEL", "TOOL"}


def test_a_resumed_run_goes_on_in_the_same_mlflow_run(runs: Runs) -> None:
    run = runs.run()
    tracker = runs.tracker(run)
    finish(run, tracker, 0)
    tracker.close("KILLED")
    assert tracker.dropped == 0
    client = MlflowClient(tracking_uri=tracker.uri)
    assert client.get_run(tracker.run_id).info.status == "KILLED"
    client.set_tag(tracker.run_id, "mlflow.note.content", "my notes")
    runs.close_run(run)

    again = runs.run(iterations=5)
    # Finished while nothing was tracked.
    again.append_metrics(1, {"rollout/return/mean": 0.1})
    second = runs.tracker(again)
    assert until(lambda: second.run_id)
    assert client.get_run(second.run_id).info.status == "RUNNING"
    finish(again, second, 2)
    second.close("FAILED")
    assert second.run_id == tracker.run_id
    assert history(tracker.uri, second.run_id) == {0: 0.0, 1: 0.1, 2: 0.2}
    found = client.get_run(second.run_id)
    assert found.info.status == "FAILED"
    assert found.data.params["iterations"] == "3"
    assert found.data.tags["changed.iterations"] == "5"
    assert found.data.tags["mlflow.note.content"] == "my notes"
    assert len(client.search_runs([second.experiment_id])) == 1


@pytest.mark.parametrize("loss", ["the record", "the run"])
def test_what_was_lost_between_the_attempts(runs: Runs, loss: str) -> None:
    run = runs.run()
    tracker = runs.tracker(run)
    finish(run, tracker, 0)
    tracker.close()
    client = MlflowClient(tracking_uri=tracker.uri)
    if loss == "the record":
        run.update_record(tracking=None)
    else:
        client.delete_run(tracker.run_id)
    second = runs.tracker(run)
    assert until(lambda: second.run_id)
    second.close()
    assert (second.run_id == tracker.run_id) == (loss == "the record")
    assert history(tracker.uri, second.run_id) == {0: 0.0}
    assert run.record["tracking"]["run_id"] == second.run_id


def test_nothing_arrives_twice(runs: Runs) -> None:
    """Whoever asks, and however often: every kind of thing is sent once."""
    run = runs.run(iterations=1)
    finish(run, None, 0, **{"selector/update/switched": 1.0, "selector/update/measured_seconds": 2})
    evaluate(run, 1, **{"return/mean": 0.5})
    client, known = None, None
    for _ in range(3):
        tracker = runs.tracker(run)
        tracker.changed()
        tracker.changed()
        tracker.close()
        assert (tracker.waiting, tracker.dropped) == (False, 0)
        client = client or MlflowClient(tracking_uri=tracker.uri)
        sent = json.loads(client.get_run(tracker.run_id).data.tags["earl.sent"])
        sent.pop("system", None)  # the machine's load is measured now and then
        assert sent == {
            "chart": 0, "checkpoints": 2, "child run": 1, "config.yaml": 1, "evaluation": 1,
            "inputs": 0, "metrics": 0, "metrics.json": 4, "past": 0, "plan": 0, "results": 1,
            "trace": 0,
        }  # fmt: skip
        assert history(tracker.uri, tracker.run_id) == {0: 0.0}
        assert history(tracker.uri, tracker.run_id, "1_learning/return_held_out") == {1: 0.5}
        files = {path.name: path.stat().st_mtime_ns for path in stored_files(runs)}
        assert {"config.yaml", "000000.json", "predicted_and_measured.svg"} <= set(files)
        traces = client.search_traces(locations=[tracker.experiment_id], run_id=tracker.run_id)
        assert len(traces) == 1
        assert len(client.search_runs([tracker.experiment_id])) == 2
        assert [each.version for each in client.search_model_versions("name = 'first'")] == [1]
        # config.yaml is each attempt's, and this is one attempt.
        known = known or files
        assert files == known


def stored_files(runs: Runs) -> list[Path]:
    return [p for p in (runs.path / "runs" / "mlartifacts").rglob("*") if p.is_file()]


def test_a_run_that_went_back_sends_its_other_past_again(runs: Runs) -> None:
    run = runs.run(iterations=4)
    tracker = runs.tracker(run)
    for iteration in range(3):
        finish(run, tracker, iteration)
    tracker.close()
    runs.close_run(run)
    for iteration in range(1, 3):
        (run.checkpoint_path(iteration) / "STABLE").unlink()
    metrics = run.path / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes().splitlines(keepends=True)[0])
    (run.path / "set_aside" / "1").mkdir(parents=True)

    again = runs.run(iterations=4)
    second = runs.tracker(again)
    finish(again, second, 1, **{"only/now": 1.0})
    second.close()
    client = MlflowClient(tracking_uri=second.uri)
    assert history(second.uri, second.run_id, "only/now") == {1: 1.0}
    # What is the same arrives once, though all was sent again.
    rows = client.get_metric_history(second.run_id, "1_learning/return")
    assert sorted(row.step for row in rows) == [0, 1, 1, 2]
    traces = client.search_traces(locations=[second.experiment_id], run_id=second.run_id)
    assert len(traces) == 3
    assert second.dropped == 0


def test_evaluations_of_an_untracked_attempt_are_sent(runs: Runs) -> None:
    assert "evaluation" not in STAGES
    run = runs.run()
    evaluate(run, 2, **{"outcome/win/share": 0.25})
    tracker = runs.tracker(run)
    tracker.close()
    assert history(tracker.uri, tracker.run_id, "1_learning/win_rate_held_out") == {2: 0.25}


def test_switched_off_it_does_nothing(runs: Runs) -> None:
    run = runs.run(tracking={"enabled": False})
    before = set(threading.enumerate())
    tracker = runs.tracker(run)
    finish(run, tracker, 0)
    tracker.close()
    assert not set(threading.enumerate()) - before
    assert tracker.run_id is None
    assert "tracking" not in run.record


def test_credentials_reach_neither_logs_nor_records(
    runs: Runs, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKER", "http://me:hunter2@127.0.0.1:9")
    run = runs.run(tracking={"uri": "env:TRACKER"})
    tracker = runs.tracker(run)
    assert until(lambda: tracker.failing)
    tracker.close()
    assert tracker.uri == "http://127.0.0.1:9"
    assert len(warnings_in(caplog)) == 1
    assert "hunter2" not in caplog.text


def test_what_an_environment_says_reaches_mlflow_without_secrets(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "sesame, open up"
    monkeypatch.setenv("DOOR_PASSWORD", secret)
    run = runs.run()
    (runs.path / "runs" / "mlflow.db").unlink(missing_ok=True)
    tracker = runs.tracker(run)
    sample = Sample()
    sample.begin_turn([1], f"the door wants {secret}")
    sample.answer([2], [-0.5], [VersionSpan(0, 0, 1)], secret)
    plan = {"stages": [], "reasons": {"update": f"because {secret}"}}
    finish(run, tracker, 0, plan, [Episode(1, 0, 0, [sample], "done")])
    tracker.close()
    (kept,) = read_episodes(run.episodes_path(0), None, 9)
    assert (kept["turns"][0]["observation"], kept["turns"][0]["answer"]) == (
        "the door wants (hidden)",
        "(hidden)",
    )
    # Real plans are made of numbers: none is told a secret that its manifest could hold.
    run.stage_path(0, "select").unlink()
    stored = b"".join(p.read_bytes() for p in (runs.path / "runs").rglob("*") if p.is_file())
    assert b"because (hidden)" in stored
    assert b"the door wants (hidden)" in stored
    assert secret.encode() not in stored
    assert (runs.path / "runs" / "mlflow.db").stat().st_mode & 0o777 == 0o600
