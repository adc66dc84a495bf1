"""What `test_low_rank` does in several ranks: adapters on each mesh against one process."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import torch
from safetensors.torch import load_file

from earl_core.config.model import AdapterConfig
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.learner.data.packing import TrainingSample
from earl_core.learner.loading import first_policy
from earl_core.learner.low_rank import base_alone
from earl_core.learner.parallel.mesh import create_mesh
from earl_core.learner.policy_learner import PolicyLearner
from earl_core.learner.reshard import reshard
from earl_core.learner.state.checkpoint import write_training_state
from earl_core.tensors.slices import local_part, slices_of
from earl_core.weights.publish import publish
from tests.learner.cuts import meshes
from tests.learner.mesh_cases import ADAPTERS, Case, model
from tests.learner.mesh_ranks import compute_alone, differences
from tests.learnt import assert_learnt

MIXED = Case(
    kind="qwen2",
    update={"precision": "bf16", "max_tokens_per_microbatch": 1},
    adapter={"rank": 4, "alpha": 8},
)


def prepare(scratch: Path) -> None:
    """Write the models, what one process computes, and the state it has then."""
    from tests.learner.helpers import save_model

    for kind in ("llama", "qwen2"):
        save_model(model(kind), scratch / kind)
    compute_alone(scratch, ADAPTERS)
    learner = ADAPTERS["all_linear"].learner(scratch)
    samples = ADAPTERS["all_linear"].dealt_to(learner.mesh)
    before = {name: each.clone() for name, each in learner.parallel.published.items()}
    norms = [learner.update(samples, iteration=k)["grad_norm"] for k in range(2)]
    assert_learnt(norms, before, learner.parallel.published)
    learner.save(scratch / "state", {"policy_version": 2})
    (scratch / "shared").mkdir()
    (scratch / "digest").write_text(published(learner, scratch / "shared", 2))


def published(learner: PolicyLearner, directory: Path, version: int) -> str:
    manifest = publish(
        learner.parallel.published, directory, version, "float32",
        adapter=learner.parallel.adapter, mesh=learner.mesh,
    )  # fmt: skip
    return manifest.digest


def compare(scratch: Path) -> dict[str, float]:
    """Every mesh of the world."""
    return _compare(scratch, meshes(int(os.environ["WORLD_SIZE"])))


def compare_pairs(scratch: Path) -> dict[str, float]:
    """Two tensor ranks beside two ranks of each other axis."""
    every = meshes(int(os.environ["WORLD_SIZE"]))
    return _compare(scratch, [each for each in every if each.tensor_parallel == 2])


def _compare(scratch: Path, shapes: list[StageDeployment]) -> dict[str, float]:
    """{"mesh case kind": difference from one process}; a state goes to the next mesh.

    Four ranks are slow on two cores: all that meshes of two have shown is looked at once.
    """
    torch.set_num_threads(1)
    found: dict[str, float] = {}
    for number, shape in enumerate(shapes):
        mesh = create_mesh(shape)
        every = shape.ranks == 2 or (shape.tensor_parallel == 2 and shape.shard == 2)
        for name, case in ADAPTERS.items() if every else [*ADAPTERS.items()][:1]:
            learner = case.learner(scratch.parent, mesh)
            alone = scratch.parent / f"{name}.safetensors"
            for kind, difference in differences(case, learner, alone).items():
                found[f"{shape} {name} {kind}"] = difference
        check_frozen(learner)
        if every:
            check_base(learner, case)
            check_mixed(MIXED.learner(scratch.parent, mesh))
            learner = ADAPTERS["all_linear"].learner(scratch.parent, mesh)
            check_states(learner, scratch, shapes[(number + 1) % len(shapes)])
        learner.mesh.close()
    return found


def check_base(learner: PolicyLearner, case: Case) -> None:
    """Without its pairs a learner scores as before it learnt, bit for bit, where B began as 0."""
    samples = case.dealt_to(learner.mesh)
    fresh = case.learner(Path(learner.model.config._name_or_path).parent, learner.mesh)
    first, last = fresh.score(samples), learner.score(samples)
    with base_alone(learner.model):
        alone = learner.score(samples)
    for one, other, moved in zip(first, alone, last, strict=True):
        assert (one == other).all()
        assert (one != moved).any()


def check_frozen(learner: PolicyLearner) -> None:
    """The base is as its files have it, without gradients or moments."""
    stored = load_file(Path(learner.model.config._name_or_path) / "model.safetensors")
    trained = learner.parallel.trained
    assert learner.optimizer.state.keys() == trained.keys()
    for each in slices_of(learner.named_weights()):
        if each.name not in trained:
            assert torch.equal(each.tensor, stored[each.name][each.box.index]), each.name
    assert {name for name, each in learner.named_parameters() if each.requires_grad} == {*trained}


def check_states(learner: PolicyLearner, scratch: Path, other: StageDeployment) -> None:
    """A state of one process: published here, saved here, and moved to another mesh, bit for
    bit."""
    assert learner.restore(scratch.parent / "state") == {"policy_version": 2}
    digest = (scratch.parent / "digest").read_text()
    shared = scratch / "shared"
    shared.mkdir(exist_ok=True)
    assert published(learner, shared, 2) == digest
    learner.save(scratch / "saved", {"policy_version": 2})
    for file in ("adapter/adapter_model.safetensors", "optimizer.safetensors"):
        assert (scratch / "saved" / file).read_bytes() == (
            scratch.parent / "state" / file
        ).read_bytes(), file
    check_two_hosts(learner, scratch)
    reshard(learner, other, learner.config)
    assert published(learner, shared, 2) == digest
    learner.save(scratch / "saved", {"policy_version": 2})
    stored = load_file(scratch.parent / "state" / "optimizer.safetensors")
    assert load_file(scratch / "saved" / "optimizer.safetensors").keys() == stored.keys()
    for name, each in load_file(scratch / "saved" / "optimizer.safetensors").items():
        assert torch.equal(each, stored[name]), name
    samples = ADAPTERS["all_linear"].dealt_to(learner.mesh)
    assert learner.update(samples, iteration=2)["grad_norm"] > 1e-3
    check_first(learner, samples, scratch.parent / "state")


def check_first(learner: PolicyLearner, samples: list[TrainingSample], state: Path) -> None:
    """With the pairs that training began with a learner scores as before it learnt; then it goes on
    with its own."""
    adapter = AdapterConfig.model_validate({"from": str(state / "adapter")})
    last = learner.score(samples)
    with first_policy(learner.model, adapter):
        first = learner.score(samples)
    again = learner.score(samples)
    learner.restore(state)
    for one, other, moved, back in zip(first, learner.score(samples), last, again, strict=True):
        assert (one == other).all()
        assert (one != moved).any()
        assert (back == moved).all()


def check_two_hosts(learner: PolicyLearner, scratch: Path) -> None:
    """PEFT knows no index: one host writes all pairs, with what the other sends it."""
    size = learner.mesh.deployment.ranks
    hosts = ["a"] * (size // 2) + ["b"] * (size - size // 2)
    write_training_state(
        scratch / "hosts",
        model=learner.model,
        tokenizer=learner.tokenizer,
        optimizer=learner.optimizer,
        state={},
        mesh=dataclasses.replace(learner.mesh, hosts=hosts),
        adapter=learner.parallel.adapter,
    )
    written, one = scratch / "hosts" / "adapter", scratch.parent / "state" / "adapter"
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (written / file).read_bytes() == (one / file).read_bytes()
    assert len(list(written.iterdir())) == 2


def check_mixed(learner: PolicyLearner) -> None:
    """A frozen base of bf16 beside pairs of float32, which learn."""
    trained = learner.parallel.trained
    kinds = {name in trained: each.dtype for name, each in learner.named_parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    before = {name: local_part(each).clone() for name, each in trained.items()}
    samples = MIXED.dealt_to(learner.mesh)
    norms = [learner.update(samples, iteration=k)["grad_norm"] for k in range(2)]
    assert min(norms) > 1e-3
    after = learner.parallel.trained
    moved = [not torch.equal(before[n], local_part(each)) for n, each in after.items()]
    assert any(moved)
