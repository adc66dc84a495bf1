"""Runs with a critic: killed between the two updates, warmed up, with sparse checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from earl_core.run.checkpoints import CRITIC_FOLDER, verify_checkpoint
from earl_core.tensors.errors import CheckpointError
from tests.flows.runs import KILLED, Runs
from tests.learnt import SMALLEST_CHANGE, SMALLEST_NORM, largest_change, weights_in

Undisturbed = Callable[..., Runs]

CRITIC = ("algorithm={advantage: gae}", "critic={learning_rate: 0.001, epochs: 2}")
STAGES = ["select", "rollout", "reward", "value", "advantage", "update", "critic", "publish"]


def assert_as_undisturbed(runs: Runs, undisturbed: Undisturbed) -> None:
    """Equal policies, critics and optimizers, which both learnt; nothing left."""
    other = undisturbed(*CRITIC)
    for iteration in range(2):
        assert runs.weights(iteration) == other.weights(iteration)
    norms = [line["critic/grad_norm"] for line in runs.metrics()]
    assert len(norms) == 2
    assert min(norms) > SMALLEST_NORM
    critics = [weights_in(critic_of(runs, iteration)) for iteration in range(2)]
    assert largest_change(*critics) > SMALLEST_CHANGE
    assert runs.shared_memory() == []


def critic_of(runs: Runs, iteration: int) -> Path:
    return runs.run() / "checkpoints" / f"{iteration:06d}" / CRITIC_FOLDER / "policy"


def test_killed_between_the_two_updates(runs: Runs, undisturbed: Undisturbed) -> None:
    """The policy's is not repeated, and nothing before it; nor is it when the critic's, saved but
    not sealed, is: its state is told from another attempt's."""
    runs.train(*CRITIC, fault="update.after@1=kill", expect=KILLED)
    runs.wait_for_workers_to_end()
    assert (1, "update") in runs.executed("sealed")
    assert (1, "critic") not in runs.executed("started")
    runs.train(*CRITIC, fault="critic.seal@1=kill", expect=KILLED)
    runs.wait_for_workers_to_end()
    runs.train(*CRITIC)
    started = runs.executed("started")
    for stage in STAGES:
        assert started.count((1, stage)) == (2 if stage == "critic" else 1), stage
    applied = [x for x in runs.ledger() if x["event"].startswith("steps applied")]
    assert [(x["iteration"], x["stage"]) for x in applied] == [
        (0, "update"), (0, "critic"), (1, "update"), (1, "critic"), (1, "critic"),
    ]  # fmt: skip
    assert_as_undisturbed(runs, undisturbed)
    runs.wait_for_workers_to_end()


def test_sparse_checkpoints_and_a_damaged_critic(runs: Runs, undisturbed: Undisturbed) -> None:
    """One STABLE covers both: what lies between it and a kill is repeated of both, from the same
    shards; a checkpoint whose critic is damaged is none."""
    again = {"overrides": [*CRITIC, "checkpoint.every=2"]}
    first, last = runs.train_here({**again, "fault": "critic.before@1=raise"}, again)
    assert "injected failure" in str(first)
    assert last is None
    sealed = runs.executed("sealed")
    for stage, times in {"rollout": 1, "value": 1, "update": 2, "critic": 2}.items():
        assert sealed.count((0, stage)) == times, stage
    assert runs.weights(1) == undisturbed(*CRITIC).weights(1)
    verify_checkpoint(runs.run(), 1)
    (file,) = critic_of(runs, 1).glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="critic"):
        verify_checkpoint(runs.run(), 1)
    shutil.rmtree(file.parents[1])
    with pytest.raises(CheckpointError, match="critic is missing"):
        verify_checkpoint(runs.run(), 1)


def test_a_critic_is_warmed_up_alone(runs: Runs) -> None:
    """The policy of such an iteration is the initial one, bit for bit; only then both learn, and
    its learning rate rises. After an iteration without a critic there is none to go on with, which
    is said before anything is played."""
    warm = "critic={learning_rate: 0.001, warmup_iterations: 1}"
    with_it = [CRITIC[0], warm, "update.warmup_iterations=2", "checkpoint.keep_last=3"]
    *trained, refused = runs.train_here(
        {"overrides": with_it},
        {"overrides": ["iterations=3", "checkpoint.keep_last=3"]},
        {"overrides": [*with_it, "iterations=4"]},
    )
    assert trained == [None, None]
    assert "has no state of the critic, which the run was without then" in str(refused)
    assert max(runs.executed("started"))[0] == 2
    first, second, _ = runs.metrics()
    initial, policies = weights_in(runs.model), [weights_in(runs.policy(k)) for k in range(2)]
    assert first["update/optimizer_steps"] == 0
    assert largest_change(initial, policies[0]) == 0
    assert first["critic/grad_norm"] > SMALLEST_NORM
    # What a critic that has learnt nothing expects.
    assert first["critic/value_mean"] == 0
    assert second["critic/value_mean"] != 0
    assert second["update/learning_rate"] == 0.5e-3
    assert second["critic/learning_rate"] == 1e-3
    assert second["update/grad_norm"] > SMALLEST_NORM
    assert largest_change(*policies) > SMALLEST_CHANGE


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["pinned", "stream"])
def test_a_critic_beside_rollouts_that_run_ahead(mode: str, runs: Runs) -> None:
    """Each iteration's values are of the critic that the one before has trained."""
    corrected = "algorithm={advantage: gae, importance_correction: {}}"
    ahead = [f"schedule={{staleness: 1, mode: {mode}}}", "stages={placement: shared}"]
    runs.train(corrected, CRITIC[1], *ahead, "iterations=3")
    lines = runs.metrics()
    assert [line["critic/value_mean"] == 0 for line in lines] == [True, False, False]
    assert min(line["critic/grad_norm"] for line in lines) > SMALLEST_NORM
    assert min(line["update/grad_norm"] for line in lines) > SMALLEST_NORM
    sealed = runs.executed("sealed")
    for k in range(1, 3):
        assert sealed.index((k - 1, "critic")) < sealed.index((k, "value"))
