"""Whole runs that train an adapter: killed, resumed over a change of the mesh, read again."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from earl_core.config import ConfigError
from earl_core.control.policy_player import PolicyPlayer, find_checkpoint
from earl_core.pretrained.adapter_directory import pair_names
from earl_core.run.record import stored_config
from flows.cli.exporting import export
from flows.cli.found_runs import evaluations_of
from tests.flows.runs import KILLED, Runs
from tests.learnt import assert_learnt, weights_in

SHAPE = {"rank": 4, "alpha": 8}
ADAPTER = (
    f"model.adapter={json.dumps(SHAPE)}",
    "algorithm.kl={placement: loss, coefficient: 0.05}",
    "stages.changes=[{iteration: 1, update: {tensor_parallel: 2}}]",
    "update.learning_rate=1e-2",
    "evaluation={every: 1, episodes: 8}",
)


@pytest.mark.slow
def test_killed_over_a_change_of_the_mesh_equals_an_undisturbed_run(runs: Runs) -> None:
    runs.train(*ADAPTER, "name=whole")
    runs.assert_learnt("whole")
    state = runs.run("whole") / "checkpoints" / "000001"
    assert sorted(path.name for path in (state / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert not (state / "policy").exists()
    pairs = load_file(state / "adapter" / "adapter_model.safetensors")
    assert pairs[pair_names("model.layers.0.self_attn.q_proj.weight")[0]].shape == (4, 32)
    whole = (runs.model / "model.safetensors").stat().st_size
    published = json.loads(
        (runs.run("whole") / "iterations" / "000001" / "publish.json").read_text()
    )["outputs"]["weights"]
    assert published["adapter"]["rank"] == 4
    assert published["files"][0]["bytes"] < whole / 2
    # One learner: the reference is its base, and no group of its own was started.
    logs = {path.name.partition(".")[0] for path in (runs.run("whole") / "logs").rglob("*.log")}
    assert not any("reference" in name for name in logs), logs
    for metrics in runs.metrics("whole"):
        assert metrics["reference/tokens_per_second"] > 0
    assert runs.metrics("whole")[1]["update/reference_kl"] > 1e-4
    check_readers(runs)
    check_beginning(runs)
    runs.train(*ADAPTER, fault="update.seal@1=kill", expect=KILLED)
    runs.wait_for_workers_to_end()
    runs.train(*ADAPTER)
    for iteration in range(2):
        assert runs.weights(iteration) == runs.weights(iteration, "whole")
    assert runs.executed("sealed").count((1, "reference")) == 1
    assert runs.shared_memory() == []
    runs.wait_for_workers_to_end()


def check_beginning(runs: Runs) -> None:
    """A run that begins with those pairs goes on when they are gone, and plays them as its first
    policy."""
    last = runs.run("whole") / "checkpoints" / "000001" / "adapter"
    begun = [f"model.adapter={json.dumps(SHAPE | {'from': str(runs.directory / 'pairs')})}"]
    begun += ["iterations=1", "name=second", "evaluation={every: 1, episodes: 8}"]
    shutil.copytree(last, runs.directory / "pairs")
    (ending,) = runs.train_here({"overrides": begun, "fault": "update.before@0=raise"})
    assert "injected" in str(ending)
    shutil.rmtree(runs.directory / "pairs")
    assert runs.train_here({"overrides": begun}) == [None]
    (line,) = runs.metrics("second")
    pairs = [weights_in(each) for each in (last, runs.policy(0, "second"))]
    assert_learnt([line["update/grad_norm"]], *pairs)
    kept = [evaluations_of(runs.run(name)) for name in ("whole", "second")]
    assert kept[0][-1]["return/mean"] == kept[1][0]["return/mean"]


def check_readers(runs: Runs) -> None:
    """A checkpoint and the initial model play as they did in training; both exports are one
    model."""
    run = runs.run("whole")
    config = stored_config(run)
    kept = {int(line["iteration"]): line["return/mean"] for line in evaluations_of(run)}
    for which, version in (("last", 2), ("initial", 0)):
        found = find_checkpoint(run, config, which)
        with PolicyPlayer(config, found) as player:
            assert player.evaluate(8, None)["metrics"]["return/mean"] == kept[version]
    with pytest.raises(ConfigError, match="is a whole model: export it --to hf"):
        export("whole", str(run.parent), "adapter", "initial", None)
    exported = []
    for to, loader in (("hf", AutoModelForCausalLM), ("adapter", AutoPeftModelForCausalLM)):
        target = run.parent.parent / to
        export("whole", str(run.parent), to, "last", target)
        exported.append(loader.from_pretrained(target, dtype=torch.float32))
        card = (target / "README.md").read_text()
        assert "low-rank pairs of rank 4 and alpha 8" in card
        assert f"library_name: {'peft' if to == 'adapter' else 'transformers'}" in card
    tokens = torch.arange(4, 12)[None]
    merged, paired = (model(tokens).logits.log_softmax(-1) for model in exported)
    assert torch.allclose(merged, paired, atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(runs.model, dtype=torch.float32)
    assert not torch.allclose(merged, base(tokens).logits.log_softmax(-1), atol=1e-2)
