"""Whole runs of an agent that knows the policy by its base URL alone."""

from __future__ import annotations

import importlib.util
import json
import sys
from contextlib import nullcontext
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from earl_core.config import RunConfig
from flows.debug import Debugged, opened_here
from tests.conformance.test_whole_iterations import configured, save
from tests.engines.forked import forked_engines
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


VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
ALGORITHM = {
    "policy_loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
    "advantage": {"name": "rloo"},
    "kl": {"placement": "loss", "coefficient": 0.1},
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", pytest.param("vllm", marks=VLLM)])
def test_schemas_and_required_calls_are_masked_by_either_engine(
    engine: str, tmp_path: Path
) -> None:
    """As an unchanged agent asks for them: the learner has the engine's log-probs, after updates
    too, and learns."""
    # Of 32, the smallest head that vLLM has.
    shape = {"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 2048}
    config = configured(save("Llama", shape, tmp_path / "model"), ALGORITHM, tmp_path, 2)
    config["environment"] = {"agent": "tests.rollout.agents:painter"}
    config["rollout"] |= {
        "engine": engine,
        "vllm": {"kv_cache_gib": 1},
        "max_tokens_per_turn": 400,
        "requests": {"constrained": "engine"},
    }
    config["update"]["epochs"] = 1
    with (
        forked_engines() if engine == "vllm" else nullcontext(),
        opened_here(RunConfig.model_validate(config), lambda *_: None) as controller,
    ):
        for number in range(2):
            sealed = Debugged(controller, number).whole()
            rollout, update = sealed["rollout"].metrics, sealed["update"].metrics
            rows = pq.read_table(controller.run.episodes_path(number)).to_pylist()
            assert {row["outcome"] for row in rows} <= {"paint", "wash"}
            assert rollout["episodes_failed"] == 0
            assert rollout["constrained_satisfied_share"] == 1.0
            assert update["mismatch_max"] < 1e-4
            assert update["grad_norm"] > 0.01


@pytest.mark.slow
def test_environments_under_another_interpreter_train(runs: Runs) -> None:
    """Here it is the same Python, started with nothing of ours but the hosts' program."""
    runs.train(*LEARNING, "iterations=2", f"environment.python={sys.executable}")
    runs.assert_learnt()
    record = json.loads((runs.run() / "environments.json").read_text())["tic_tac_toe"]
    assert record["interpreter"] == sys.executable
    assert record["python"] == sys.version.split()[0]
    assert record["pydantic"]
