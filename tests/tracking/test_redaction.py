"""Rules of a run (`tracking.redact`): secrets in every field of its episodes reach no reader."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from earl_core.config import ConfigError
from earl_core.config.stage_keys import stage_settings
from earl_core.deployment.stages import STAGES
from earl_core.run import RunDirectory
from earl_core.run.kept_episodes import read_episodes
from earl_core.secrets import redact_error, redactor
from earl_core.system.errors import EarlError
from flows.cli.comparing import compare_runs
from flows.cli.exporting import export
from flows.cli.report import report
from flows.cli.training import preflight
from tests.flows.confidential import ALIKE, CARD, NUMBER, PERSON, PLAN, RULES, found_in, unpacked
from tests.run.test_episode_export import kept
from tests.run.test_run_directory import config_in
from tests.tracking.conftest import Runs, warnings_in

CALL = json.dumps({"name": "look_up", "arguments": {"who": PERSON, "card": CARD}})
TEXTS = [
    f"You serve {PERSON}.\nWho is {NUMBER}?", f"<think>{ALIKE} it is</think> The word is Zugvog",
    f"<tool_response>{CARD}</tool_response>", f"elwiese <tool_call>{CALL}</tool_call>",
    f"INTERNAL ONLY: {PLAN}", f"so {PLAN}",
    f"Bye, ada\u200b LOVELACE, {NUMBER}",
]  # fmt: skip
EPISODE: dict[str, Any] = {
    "texts": TEXTS, "prompt_id": 7, "group_id": 7, "reward": 0.5, "turns": 3,
    "environment": f"office of {PERSON}", "finish_reason": f"left by {NUMBER}",
    "outcome": f"told {ALIKE}", "scores": json.dumps({f"judge {PERSON}": 0.25}),
    "scoring": json.dumps({ALIKE: {"card": CARD}, "note": f"INTERNAL ONLY: {PLAN}"}),
    "tokens": [1, 5, 2, 6, 3, 7], "loss_mask": [0, 1] * 3, "rollout_logprobs": [0.0, -0.5] * 3,
    "turn_starts": [0, 2, 4],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Those of a test are not for the next one; logged as in every process of ours."""
    monkeypatch.setattr(redactor, "_rules", {})
    monkeypatch.setenv("EARL_TEST_REDACTION_KEY", "a long key")
    factory = logging.getLogRecordFactory()
    redactor.guard_logging()
    yield
    logging.setLogRecordFactory(factory)


def confidential(runs: Runs, name: str, rules: str = RULES) -> RunDirectory:
    """A run with two such episodes in iteration 3, one of which was told another one's name."""
    (runs.path / "rules.yaml").write_text(rules)
    run = runs.run(name, tracking={"redact": str(runs.path / "rules.yaml"), "trace_episodes": 5})
    run.store_config()
    other = {**EPISODE, "texts": [*TEXTS[:6], f"Bye, {NUMBER}"], "reward": 0.25}
    kept(run.path, [EPISODE, other])
    numbers = {f"rollout/outcome/told {PERSON}": 0.5, "rollout/outcome/told nobody": 0.5}
    run.append_metrics(3, {"rollout/return/mean": 0.5, **numbers})
    run.note(3, "reward", f"failed: ValueError: {PERSON} has {CARD}")
    return run


def test_planted_secrets_are_in_no_page_and_no_trace(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = confidential(runs, "first"), confidential(runs, "second")
    file = run.episodes_path(3).read_bytes()
    tracker = runs.tracker(run)
    tracker.changed()
    tracker.close()
    client = MlflowClient(tracking_uri=tracker.uri)
    traces = client.search_traces(locations=[tracker.experiment_id], run_id=tracker.run_id)
    shown = json.dumps([trace.to_dict() for trace in traces])
    assert len(traces) == 2
    assert found_in(shown.encode()) == []
    for left in ("(turn dropped)", "(person ", "<think>(hidden) it is</think>"):
        assert left in shown
    for stored in (runs.path / "runs").glob("ml*/**/*"):
        assert not stored.is_file() or found_in(stored.read_bytes()) == [], stored
    assert found_in((runs.path / "runs" / "mlflow.db").read_bytes()) == []
    told = client.get_run(tracker.run_id).data.metrics
    assert [name for name in told if "nobody" in name]
    assert not [name for name in told if "Ada" in name or "hidden" in name]

    page = runs.path / "page.html"
    report(str(run.path), "", page, 10)
    content = page.read_bytes()
    assert found_in(content) == []
    assert b"(turn dropped)" in unpacked(content)
    assert b"(person " in unpacked(content)
    assert b"ValueError: (hidden) has (hidden)" in content
    compare_runs([str(run.path), str(other.path)], "", page, prompts=1)
    assert found_in(page.read_bytes()) == []
    assert b"(turn dropped)" in unpacked(page.read_bytes())
    export(str(run.path), "", "episodes", "last", runs.path / "episodes.jsonl")
    assert found_in((runs.path / "episodes.jsonl").read_bytes()) == []
    printed = capsys.readouterr().out
    assert "rules of redaction found nothing in what was shown: word 3" in printed
    assert found_in(printed.encode()) == []
    error = EarlError(f"{PERSON} failed", remedy=f"ask {NUMBER}")
    assert found_in(str(redact_error(error)).encode()) == []
    assert run.episodes_path(3).read_bytes() == file
    assert read_episodes(run.episodes_path(3), None)[0]["closing"] == TEXTS[-1]


def test_words_of_our_own_leave_pages_and_curves_whole(
    runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    words = "iteration, name, reward, facts, events, time, rollout, settings, state, seed, Lovelace"
    run = confidential(runs, "first", f"words: [{words}]")
    other = confidential(runs, "second", f"words: [{words}]")
    tracker = runs.tracker(run)
    tracker.changed()
    tracker.close()
    assert warnings_in(caplog) == []
    client = MlflowClient(tracking_uri=tracker.uri)
    data = client.get_run(tracker.run_id).data
    assert "evaluation.every" in data.params
    assert "seed" not in data.params
    page = runs.path / "page.html"
    report(str(run.path), "", page, 10)
    for key in ("facts", "events", "name", "sections"):
        assert f'"{key}":'.encode() in page.read_bytes()
    compare_runs([str(run.path), str(other.path)], "", page, prompts=1)
    assert b'"labels":' in page.read_bytes()
    assert b"Lovelace" not in page.read_bytes() + unpacked(page.read_bytes())


def test_names_in_settings_reach_no_tracker(runs: Runs) -> None:
    (runs.path / "rules.yaml").write_text(f"words: [{PERSON}]")
    run = runs.run(
        "first",
        tracking={"redact": str(runs.path / "rules.yaml")},
        environment={"name": "tictactoe", "options": {f"of {PERSON}": {PERSON: 1}}},
    )
    run.append_metrics(0, {"rollout/return/mean": 0.5})
    tracker = runs.tracker(run)
    tracker.changed()
    tracker.close()
    assert b"Lovelace" not in (runs.path / "runs" / "mlflow.db").read_bytes()


@pytest.mark.parametrize("how", ["drop", "hash"])
def test_any_field_may_be_missing(runs: Runs, how: str) -> None:
    """Pages and traces are made of what is left."""
    fields = [
        *("episode_id", "group_id", "prompt_id", "environment", "outcome", "finish_reason"),
        *("scores", "scoring", "messages", "closing", *(["reward"] if how == "drop" else [])),
    ]
    rules = f"{how}_fields: [{', '.join(fields)}]\nkey: env:EARL_TEST_REDACTION_KEY"
    run, other = confidential(runs, "first", rules), confidential(runs, "second", rules)
    run.append_metrics(3, {"rollout/return/mean": 0.5})
    tracker = runs.tracker(run)
    tracker.changed()
    tracker.close()
    client = MlflowClient(tracking_uri=tracker.uri)
    traces = client.search_traces(locations=[tracker.experiment_id], run_id=tracker.run_id)
    shown = [json.dumps([trace.to_dict() for trace in traces]).encode()]
    assert len(traces) == 2
    page = runs.path / "page.html"
    report(str(run.path), "", page, 10)
    shown.append(unpacked(page.read_bytes()))
    compare_runs([str(run.path), str(other.path)], "", page, prompts=1)
    shown.append(unpacked(page.read_bytes()))
    for text in shown:
        assert found_in(text) == []
        assert (b"(left out)" in text) == (how == "drop")


def test_rules_that_leave_nothing_show_nothing(
    runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    run = confidential(runs, "first", "drop_turns: [You serve, tool_response, INTERNAL, Bye]")
    tracker = runs.tracker(run)
    tracker.changed()
    tracker.close()
    (warning,) = warnings_in(caplog)
    assert "iteration 3 is not traced: the rules leave nothing of any text" in warning.getMessage()
    client = MlflowClient(tracking_uri=tracker.uri)
    assert not client.search_traces(locations=[tracker.experiment_id], run_id=tracker.run_id)
    with pytest.raises(ConfigError, match="leave nothing of any text"):
        report(str(run.path), "", runs.path / "page.html", 10)
    assert not (runs.path / "page.html").exists()


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        (None, "tracking.redact: the rules .* cannot be read: No such file"),
        ("words: [", "is not valid YAML"),
        ("patterns: [{name: a, match: '.+'}]", "hide every word"),
        ("hash_fields: [outcome]\nkey: env:EARL_NOT_THERE", "leads to nothing"),
    ],
)
def test_bad_rules_are_refused_before_a_run(tmp_path: Path, rules: str | None, why: str) -> None:
    if rules is not None:
        (tmp_path / "rules.yaml").write_text(rules)
    config = config_in(tmp_path, tracking={"redact": str(tmp_path / "rules.yaml")})
    with pytest.raises(ConfigError, match=why):
        preflight(config, tmp_path / "runs" / "run")
    with pytest.raises(ConfigError, match=why):
        RunDirectory.open(config)
    assert not list((tmp_path / "runs").glob("*/config.yaml"))


def test_no_stage_depends_on_rules_and_their_path_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    without = config_in(tmp_path)
    with_rules = config_in(tmp_path, tracking={"redact": "rules.yaml"})
    assert with_rules.tracking.redact == str(tmp_path / "rules.yaml")
    for stage in (*STAGES, "evaluation"):
        assert stage_settings(with_rules, stage) == stage_settings(without, stage)
