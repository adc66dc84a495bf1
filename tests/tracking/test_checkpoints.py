"""The best and the last checkpoint as versions of a registered model."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient
from transformers import AutoModelForCausalLM, AutoTokenizer

from earl_core.config import ConfigError
from earl_core.run.checkpoints import best_checkpoint
from tests.tracking.conftest import Runs, evaluate, learn


def test_transformers_loads_what_is_registered(runs: Runs, policy: Path) -> None:
    run = runs.run(checkpoint={"keep_last": 1})
    tracker = runs.tracker(run)
    for iteration, value in enumerate((0.1, 0.9, 0.5)):
        learn(run, tracker, policy, iteration, value)
    tracker.close()
    assert (tracker.waiting, tracker.dropped) == (False, 0)
    assert run.stable_iterations() == [1, 2], "pruning spares the best"
    client = MlflowClient(tracking_uri=tracker.uri)
    for alias, iterations in (("best", "2"), ("last", "3")):
        version = client.get_model_version_by_alias("first", alias)
        path = version.tags["path"]
        assert version.tags["iterations"] == iterations
        assert version.run_id == tracker.run_id
        assert version.source == Path(path).as_uri()
        assert AutoModelForCausalLM.from_pretrained(path).num_parameters() > 0
        assert len(AutoTokenizer.from_pretrained(path)) > 0
    assert len(client.search_model_versions("name = 'first'")) == 2, "no version without its files"

    client.create_model_version("first", policy.as_uri())
    again = runs.tracker(run)
    learn(run, again, policy, 3, 0.95)
    again.close()
    versions = {v.tags.get("iterations") for v in client.search_model_versions("name = 'first'")}
    assert versions == {"4", None}, "what is not of the run stays"
    aliases = client.get_registered_model("first").aliases
    assert aliases["best"] == aliases["last"]


def test_a_gate_keeps_out_what_has_forgotten(runs: Runs, policy: Path) -> None:
    suites = [
        {"name": "tictactoe", "label": "first", "gate": True},
        {"name": "tictactoe", "label": "other"},
    ]
    run = runs.run(evaluation={"every": 1, "suites": suites})
    tracker = runs.tracker(run)
    began = {"suite/first/pass_at_1/low": 0.6, "suite/other/pass_at_1/low": 0.6}
    evaluate(run, 0, **{"return/mean": 0.0, **began})
    rates = (0.7, 0.59, 0.6, 0.3)
    for iteration, (value, rate) in enumerate(zip((0.1, 0.9, 0.5, 1.0), rates, strict=True)):
        passed = {"suite/first/pass_at_1": rate, "suite/other/pass_at_1": 0.0}
        learn(run, tracker, policy, iteration, value, **passed)
    tracker.close()
    assert run.best_stable() == best_checkpoint(run.path, run.config.gates) == 2
    assert best_checkpoint(run.path, ()) == 3
    client = MlflowClient(tracking_uri=tracker.uri)
    assert client.get_model_version_by_alias("first", "best").tags["iterations"] == "3"
    evaluate(run, 0, **{"return/mean": 0.0, "suite/first/pass_at_1/low": 0.9})
    assert run.best_stable() is None
    with pytest.raises(ConfigError, match="falls behind the first policy in one of the gated"):
        best_checkpoint(run.path, run.config.gates)
    # What the first policy passed is lost, or was never measured: the gate stays shut.
    sealed = run.stage_path(0, "evaluation")
    for damage in (lambda: sealed.write_text("{"), sealed.unlink):
        damage()
        assert run.best_stable() is None
        with pytest.raises(ConfigError, match=r"no evaluation .* of the first policy in the g"):
            best_checkpoint(run.path, run.config.gates)


def test_a_name_that_another_run_has(runs: Runs, policy: Path) -> None:
    run = runs.run()
    tracker = runs.tracker(run)
    client = MlflowClient(tracking_uri=tracker.uri)
    client.create_registered_model("first", {"earl.uid": "another"})
    learn(run, tracker, policy, 0, 0.1)
    tracker.close()
    assert client.search_model_versions("name = 'first'") == []
    version = client.get_model_version_by_alias(f"first-{run.uid[:8]}", "last")
    assert version.tags["iterations"] == "1"
    assert tracker.dropped == 0
