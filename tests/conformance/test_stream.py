"""Updates of a run whose groups are played as a stream, a second time in float64: what was trained
is what the sealed rows say, under the versions that they name."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from earl_core.config import RunConfig
from earl_core.control.run_controller import RunController
from flows.debug import Debugged, opened_here
from tests.conformance.reference import Reference, load, logprobs
from tests.conformance.test_whole_iterations import (
    FAMILIES,
    TEMPERATURE,
    UPDATE,
    configured,
    learnt,
    save,
    weights,
)
from tests.engines.forked import forked_engines

VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
ITERATIONS, STALENESS = 4, 2
ALGORITHM = {
    "policy_loss": {"name": "dppo", "mask_low": 0.001, "mask_high": 0.002},
    "advantage": {"name": "rloo"}, "aggregation": {"name": "token_mean"},
    "kl": {"placement": "loss", "estimator": "k3", "coefficient": 0.2},
}  # fmt: skip


def sampled_by(row: dict[str, Any], versions: dict[int, Any]) -> float:
    """The largest difference of a row's log-probs from those of the versions that it names."""
    mask = np.array(row["loss_mask"]).astype(bool)
    told, named = (np.array(row[n])[mask] for n in ("rollout_logprobs", "token_versions"))
    found = np.empty(len(told))
    with torch.no_grad():
        for version in set(named.tolist()):
            scored, _ = logprobs(versions[version], row, TEMPERATURE)
            found[named == version] = scored.numpy()[named == version]
    return float(np.abs(found - told).max())


def stopped_half_way(run: RunConfig) -> Iterator[tuple[RunController, int]]:
    """The iterations, and the controller that has the run open then."""
    for part in (range(ITERATIONS // 2), range(ITERATIONS // 2, ITERATIONS)):
        with opened_here(run, lambda *_: None) as controller:
            for number in part:
                yield controller, number


@pytest.mark.parametrize(
    "engine",
    ["torch", pytest.param("vllm", marks=[pytest.mark.slow, VLLM])],
)
def test_updates_of_a_stream_equal_the_reference(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM gives its memory to the learner between batches. In the middle the run is stopped, and
    what it has parked goes on."""
    shape = FAMILIES["Llama"][0]
    if engine == "torch":
        monkeypatch.setenv("EARL_CLOCK", "0")
    else:
        # Of 32, the smallest that vLLM has.
        shape = {**shape, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = save("Llama", shape, tmp_path / "model")
    config = configured(model, ALGORITHM, tmp_path, ITERATIONS)
    config["rollout"] |= {"max_tokens_per_turn": 24, "stop": list("aeiou012")}
    config["rollout"] |= {"engine": engine, "vllm": {"kv_cache_gib": 1}}
    config["schedule"] = {"staleness": STALENESS, "mode": "stream"}
    reference = Reference(model, ALGORITHM, UPDATE)
    versions, switched, resumed = {0: load(model)}, 0, 0.0
    run = RunConfig.model_validate(config)
    with forked_engines() if engine == "vllm" else nullcontext():
        for controller, number in stopped_half_way(run):
            sealed = Debugged(controller, number).whole()
            metrics = sealed["update"].metrics
            resumed += sealed["collect"].metrics["groups_resumed"]
            rows = pq.read_table(controller.run.episodes_path(number)).to_pylist()
            assert {row["group_id"] for row in rows} == {2 * number, 2 * number + 1}
            for row in rows:
                assert sampled_by(row, versions) < 1e-4
                named = set(row["token_versions"]) - {-1}
                assert max(0, number - STALENESS) <= min(named) <= max(named) <= number
                first, last = (row[f"policy_version_{name}"] for name in ("first", "last"))
                switched += first != last
            before = weights(reference.model)
            found = reference.iteration(rows, TEMPERATURE)
            ours, theirs = learnt(tmp_path, number), weights(reference.model)
            assert metrics["grad_norm"] == pytest.approx(found["grad_norm"], rel=1e-4)
            assert found["grad_norm"] > 0.05
            assert max(float(np.abs(theirs[n] - before[n]).max()) for n in theirs) > 1e-3
            assert max(float(np.abs(ours[n] - theirs[n]).max()) for n in theirs) < 1e-6
            versions[number + 1] = load(tmp_path / f"runs/run/checkpoints/{number:06d}/policy")
    # Without a clock time decides, and vLLM may have ended all: tests/engines/test_interruptible.py
    # switches weights in the middle of its answers.
    assert switched or engine == "vllm", "no answer went on under new weights"
    assert resumed or engine == "vllm", "no answer went on after the stop"
