"""Whole runs of an agent that knows the policy by its base URL alone."""

from __future__ import annotations

import json
import sys

import pytest
import yaml

from tests.flows.runs import KILLED, LEARNING, Runs

ASKS = {"extra_body": {"guided_regex": "[1-9]"}}
"""A move, and its end, which alone is allowed then."""


@pytest.mark.slow
def test_an_agent_trains_and_resumes(runs: Runs) -> None:
    """It asks for answers of a form, which are masked: engine, learner and reference agree."""
    options = yaml.safe_load(runs.config.read_text())["environment"]["options"]
    agent = (
        *LEARNING,
        "iterations=2",
        "environment.name=",
        "environment.agent=tests.rollout.agents:tic_tac_toe",
        f"environment.options={json.dumps({'game': options, 'asks': ASKS})}",
        "rollout.requests.constrained=engine",
        "algorithm.kl={placement: loss, coefficient: 0.1}",
        "update.minibatches=1",
    )
    runs.train(*agent, fault="rollout.seal@1=kill", expect=KILLED)
    runs.train(*agent)
    assert runs.executed("sealed").count((0, "rollout")) == 1
    runs.assert_learnt()
    for line in runs.metrics():
        assert line["rollout/new_sample_share"] == 0.0
        assert line["rollout/episodes_failed"] == 0.0
        assert line["rollout/turns/mean"] > 1
        assert line["rollout/constrained_satisfied_share"] == 1.0
        assert line["update/mismatch_max"] < 1e-4
    # The first step is that of the reference itself.
    first, second = (line["update/reference_kl"] for line in runs.metrics())
    assert first < 1e-6 < second


@pytest.mark.slow
def test_environments_under_another_interpreter_train(runs: Runs) -> None:
    """Here it is the same Python, started with nothing of ours but the hosts' program."""
    runs.train(*LEARNING, "iterations=2", f"environment.python={sys.executable}")
    runs.assert_learnt()
    record = json.loads((runs.run() / "environments.json").read_text())["tic_tac_toe"]
    assert record["interpreter"] == sys.executable
    assert record["python"] == sys.version.split()[0]
    assert record["pydantic"]
