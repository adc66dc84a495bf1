"""A mixture of experts through whole iterations: recorded, sealed, replayed."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest

from earl_core.dispatch import read_manifest
from earl_core.dispatch.shards.manifest import sealed_path
from tests.flows.runs import KILLED, Runs
from tests.learner.test_routing import SHAPE, mixture

BALANCED = "algorithm.router_aux_loss_coef=0.01"
LAYOUTS = {
    "context": [
        "stages.update={context_parallel: 2}",
        "update.activation_checkpointing=full",
        BALANCED,
    ],
    "shard": ["stages.update={shard: 2}", BALANCED],
    "compiled": ["stages.update={shard: 2}", "update.compile=true", BALANCED],
    "experts": [
        "stages.update={shard: 2}",
        "stages.changes=[{iteration: 1, update: {shard: 2, expert_parallel: 2}}]",
    ],
    "stream": ["schedule={staleness: 1, mode: stream}", "algorithm.kl={placement: none}"],
    "agent": [
        "environment={agent: 'tests.rollout.agents:tic_tac_toe', options: {game: {style: compact}}}"
    ],
}


def _settings(runs: Runs) -> list[str]:
    model = runs.directory / "mixture"
    return [
        f"model={json.dumps({'path': str(mixture(model))})}",
        "algorithm.importance_correction={cap: 2}",
        "reward.functions=[{function: 'tests.experience.scoring_functions:letters'}]",
    ]


def _trained(runs: Runs, *overrides: str) -> list[dict[str, float]]:
    """The metrics of two iterations of two minibatches each, so that old log-probs are computed,
    beside a reference that routes by itself."""
    runs.train(*_settings(runs), *overrides)
    lines = runs.metrics()
    assert len(lines) == 2
    for line in lines:
        assert line["update/grad_norm"] > 1e-3
        assert line["update/expert_load_max"] >= line["update/expert_load"] >= 1.0
        # In float32 engine and trainer choose alike, until the first of two steps moves routers.
        assert line["update/routing_changed_share"] < 0.2
    return lines


def _apart(lines: list[dict[str, float]]) -> float:
    """The largest mismatch, of tokens that the policy before an update has sampled."""
    return max(line["update/mismatch_max"] for line in lines if "update/mismatch_max" in line)


@pytest.mark.slow
def test_recorded_experts_are_sealed_and_trained_and_not_kept(runs: Runs) -> None:
    lines = _trained(runs)
    assert _apart(lines) < 1e-5
    run = runs.directory / "runs" / "run"
    columns = read_manifest(sealed_path(run, 0, "rollout")).shards[0].columns
    sizes = {name: columns[name].values[1] for name in ("tokens", "routing", "routing_hash")}
    assert sizes["routing"] == sizes["tokens"] // 4 * SHAPE.width
    assert sizes["routing_hash"] == sizes["tokens"] // 4 * 8
    kept = pq.read_schema(run / "iterations" / "000000" / "episodes.parquet")
    assert "tokens" in kept.names
    assert not {"routing", "routing_hash"} & set(kept.names)
    # Killed and resumed: the same bits.
    again = ["name=killed", *_settings(runs)]
    runs.train(*again, fault="rollout.after@1=kill", expect=KILLED)
    runs.wait_for_workers_to_end()
    runs.train(*again, fault="update.seal@1=kill", expect=KILLED)
    runs.wait_for_workers_to_end()
    runs.train(*again)
    for iteration in range(2):
        assert runs.weights(iteration, "killed") == runs.weights(iteration)
    assert runs.weights(0) != runs.weights(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        # Compiling takes a minute.
        pytest.param(name, marks=pytest.mark.campaign if name == "compiled" else ())
        for name in LAYOUTS
    ],
)
def test_routing_stays_with_its_tokens(runs: Runs, layout: str) -> None:
    """On context ranks and shards, in a stream, and behind the gateway."""
    lines = _trained(runs, *LAYOUTS[layout])
    assert _apart(lines) < 1e-5
    for line in lines:
        # To score, to count and to train: both ranks together read each token's once at a time.
        passes = 3 if BALANCED in LAYOUTS[layout] else 2
        read = line["update/routing_bytes"] / SHAPE.token_bytes
        computed = line["update/tokens"] * (1 - line["update/shared_prefix_share"])
        assert computed < read <= passes * line["update/tokens"]
    balanced = [line.get("update/router_aux_loss", 0.0) for line in lines]
    # At least the experts of a token where they are even, and few are busy in a random mixture.
    assert all(SHAPE.chosen < each < SHAPE.experts for each in balanced) == (
        BALANCED in LAYOUTS[layout]
    )
