"""Whole runs that train an adapter: killed, resumed over a change of the mesh, read again."""

from __future__ import annotations

import json
import re
import shutil
import threading
from contextlib import suppress

import httpx
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from earl_core.cluster.errors import WorkerError
from earl_core.config import ConfigError, load_config
from earl_core.control.policy_player import PolicyPlayer, find_checkpoint
from earl_core.dispatch import read_manifest
from earl_core.pretrained.adapter_directory import pair_names
from earl_core.run.record import lineage_names, read_record, stored_config
from flows.cli.exporting import export
from flows.cli.found_runs import evaluations_of
from flows.cli.training import preflight
from tests import warm
from tests.engines.models import model_logprobs
from tests.flows.runs import KILLED, Runs
from tests.flows.test_debug import DEBUGGING
from tests.learnt import SMALLEST_CHANGE, assert_learnt, largest_change, weights_in
from tests.shared import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

SHAPE = {"rank": 4, "alpha": 8}
ADAPTER = (
    f"model.adapter={json.dumps(SHAPE)}",
    "algorithm.kl={placement: loss, coefficient: 0.05}",
    "stages.changes=[{iteration: 1, update: {tensor_parallel: 2}}]",
    "update.learning_rate=1e-2",
    "evaluation={every: 1, episodes: 8}",
)


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


def test_another_run_goes_on_with_the_pairs_and_they_are_served_and_debugged(runs: Runs) -> None:
    """It begins with them as the run that is given their directory does, and needs nothing of its
    ancestor afterwards."""
    shape = f"model.adapter={json.dumps(SHAPE)}"
    common = [shape, "update.learning_rate=1e-2", ADAPTER[1]]
    first = runs.run("first") / "checkpoints" / "000001" / "adapter"
    second = [*common[1:], f"model.adapter={json.dumps(SHAPE | {'from': str(first)})}"]
    begun = [*common, "iterations=1", "model.from=first@1", "name=third"]
    endings = runs.train_here(
        {"overrides": [*common, "name=first"]},
        {"overrides": [*second, "iterations=1", "name=second"]},
        {"overrides": begun, "fault": "ancestor.copied@0=raise"},
        {"overrides": begun, "fault": "update.before@0=raise"},
    )
    assert endings[:2] == [None, None]
    assert all("injected" in str(ending) for ending in endings[2:])
    runs.run("first").rename(runs.directory / "elsewhere")
    assert runs.train_here({"overrides": begun}) == [None]
    (runs.directory / "elsewhere").rename(runs.run("first"))
    assert runs.weights(0, "third") == runs.weights(0, "second")
    (line,) = runs.metrics("third")
    began, ended = weights_in(first), weights_in(runs.policy(0, "third"))
    assert_learnt([line["update/grad_norm"]], began, ended)
    assert largest_change(weights_in(runs.policy(0, "first")), began) > SMALLEST_CHANGE
    record = read_record(runs.run("third"))
    assert lineage_names(record) == ["first@1"]
    assert record["ancestor"]["pairs"] == record["adapter"]["digest"]
    # The reference is what the run began with, and not the base, from which the first has moved.
    once = "name=fourth", "update.epochs=1", "update.minibatches=1"
    assert runs.train_here({"overrides": [*begun, *once]}) == [None]
    assert runs.metrics("first")[1]["update/reference_kl"] > 1e-4
    assert runs.metrics("fourth")[0]["update/reference_kl"] == pytest.approx(0, abs=1e-7)
    check_contradictions(runs, shape)
    check_debugged(runs)
    check_served(runs)


def check_contradictions(runs: Runs, shape: str) -> None:
    template = runs.directory / "template.jinja"
    template.write_text("{{ messages }}")
    penalty = "algorithm.kl={placement: loss, coefficient: 0.1, reference: first}"
    for overrides, said in (
        (["model.from=first"], r"first has trained an adapter \(rank 4, alpha 8.0\), and model.ad"),
        (["model.from=first", shape.replace("4", "5")], "holds an adapter of rank 4, and model.ad"),
        (
            ["model.from=first", shape, "model.adapter.from=x"],
            "'x' names other pairs than those",
        ),
        (["model.from=first", shape, f"model.chat_template={template}"], "is another one than fir"),
        ([penalty], "'first' has trained an adapter, and a reference is a whole model"),
    ):
        with pytest.raises(ConfigError, match=said):
            preflight(load_config(runs.config, [*overrides, "name=child"]), runs.run("child"))


def check_debugged(runs: Runs) -> None:
    """`earl debug` repeats an update from the pairs of a checkpoint, and from those that the run
    began with."""
    script = DEBUGGING
    for name, iteration in (("first", 1), ("third", 0)):
        arguments = f"'update', {iteration}, 1, None, [], 'runs'"
        script += f"debug({str(runs.run(name))!r}, {arguments})\nprint('----')\n"
    printed = runs.script(script, warm.ALL).split("----")
    for (name, iteration), text in zip((("first", 1), ("third", 0)), printed, strict=False):
        sealed = read_manifest(runs.run(name) / f"iterations/{iteration:06d}/update.json")
        for metric in ("loss", "grad_norm", "reference_kl"):
            (row,) = re.findall(rf"^{metric} +(\S+) +(\S+)", text, re.MULTILINE)
            assert float(row[1]) == pytest.approx(sealed.metrics[metric], rel=1e-5), text


def check_served(runs: Runs) -> None:
    """What `earl serve` answers has the merged model's log-probs."""
    run, port = runs.run("first"), free_port()
    export("first", str(run.parent), "hf", "last", runs.directory / "merged")
    config = stored_config(run)
    prompts = [[4, 9, 7, 11, 5, 8], [6, 5, 4], [10, 8, 9, 7], [5, 11, 6, 4, 9]]
    sampling = {"max_tokens": 8, "logprobs": 0}
    with PolicyPlayer(config, find_checkpoint(run, config)) as player:

        def served() -> None:
            with suppress(WorkerError):
                player.serve(port, "key", 1.0)

        serving = threading.Thread(target=served)
        serving.start()
        with httpx.Client(transport=httpx.HTTPTransport(retries=8), timeout=60) as client:
            url = f"http://127.0.0.1:{port}/inference/v1/generate"
            replies = [
                client.post(
                    url,
                    json={"token_ids": prompt, "sampling_params": sampling},
                    headers={"Authorization": "Bearer key"},
                )
                for prompt in prompts
            ]
        player.interrupt()
        serving.join(60)
    choices = [reply.json()["choices"][0] for reply in replies]
    found = [each["logprob"] for choice in choices for each in choice["logprobs"]["content"]]
    merged, base = (
        [
            value
            for prompt, choice in zip(prompts, choices, strict=True)
            for value in model_logprobs(model, prompt, choice["token_ids"], 1.0)
        ]
        for model in (
            AutoModelForCausalLM.from_pretrained(each).double()
            for each in (runs.directory / "merged", runs.model)
        )
    )
    assert found == pytest.approx(merged, abs=1e-5)
    # An answer may be a single token, of which base and merged model think alike.
    assert found != pytest.approx(base, abs=1e-4)
