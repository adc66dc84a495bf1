"""What `test_expert_parallel` does in several ranks: divided experts against one process."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.distributed import fsdp  # noqa: F401  (imported before the ranks part)

from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.learner.parallel.mesh import create_mesh
from earl_core.learner.parallel_model import build_shell, parallelize
from earl_core.learner.policy_learner import PolicyLearner
from earl_core.learner.reshard import reshard
from earl_core.system.errors import ConfigError
from earl_core.tensors.slices import local_part, slices_of
from earl_core.weights.publish import publish
from tests.learner.cuts import mesh_of
from tests.learner.helpers import save_model
from tests.learner.mesh_cases import MIXED_MIXTURE, MIXTURES, model
from tests.learner.mesh_ranks import check_shell, compute_alone, differences, mixed_distances
from tests.learnt import assert_learnt


def prepare(scratch: Path) -> None:
    """Write the models, what one process computes, and a state of its."""
    for kind in {case.kind for case in MIXTURES.values()}:
        save_model(model(kind), scratch / kind)
    exact = dataclasses.replace(MIXED_MIXTURE, update={**MIXED_MIXTURE.update, "precision": "fp32"})
    compute_alone(scratch, MIXTURES | {"mixed": MIXED_MIXTURE, "exact": exact})
    for name in MIXTURES:
        check_learnt(load_file(scratch / f"{name}.safetensors"), one=name == "one_expert")
    learner = MIXTURES["mixture"].learner(scratch)
    before = {name: each.clone() for name, each in learner.named_weights().items()}
    norm = learner.update(MIXTURES["mixture"].dealt_to(learner.mesh), iteration=0)["grad_norm"]
    assert_learnt([norm], before, learner.named_weights())
    learner.save(scratch / "state", {"policy_version": 1})
    (scratch / "shared").mkdir()
    (scratch / "digest").write_text(published(learner, scratch / "shared"))


def check_learnt(found: dict[str, torch.Tensor], *, one: bool) -> None:
    """Routers and several experts had gradients; or one expert alone had, of each layer."""
    for key, gradient in found.items():
        kind, _, name = key.partition(" ")
        if kind.startswith("gradient") and (".experts." in name or name.endswith("gate.weight")):
            moved = gradient.flatten(1).abs().amax(dim=1) > 1e-6
            if one and ".experts." in name:
                assert moved.tolist() == [True] + [False] * 7, key
            else:
                assert moved.sum() >= 4, (key, moved)


def published(learner: PolicyLearner, directory: Path) -> str:
    return publish(learner.parallel.published, directory, 1, "float32", mesh=learner.mesh).digest


def of(degree: int, *sizes: int) -> StageDeployment:
    """A mesh with its experts divided over so many ranks."""
    return mesh_of(*sizes)._replace(expert_parallel=degree)


TWO = (of(2, 1, 2, 1, 1), of(2, 2, 1, 1, 1))
FOUR = (
    of(4, 1, 4, 1, 1),
    of(4, 4, 1, 1, 1),
    of(4, 2, 2, 1, 1),
    of(2, 1, 4, 1, 1),
    of(2, 4, 1, 1, 1),
    of(2, 2, 2, 1, 1),
    of(2, 1, 2, 2, 1),
    of(2, 2, 1, 2, 1),
)


def compare(scratch: Path) -> dict[str, float]:
    """{"mesh case kind": difference from one process}; then a state through all degrees."""
    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    shapes = {2: TWO, 4: FOUR}[ranks]
    found: dict[str, float] = {}
    for shape in shapes:
        mesh = create_mesh(shape)
        for name, case in MIXTURES.items():
            learner = case.learner(scratch.parent, mesh)
            alone = scratch.parent / f"{name}.safetensors"
            for kind, difference in differences(case, learner, alone).items():
                # A context rank counts the loads of experts among its own tokens.
                if kind != "metric" or shape.context_parallel == 1:
                    found[f"{shape} {name} {kind}"] = difference
        check_parts(learner)
        check_shell(learner, mesh)
        mesh.close()
    if ranks == 2:
        check_refusals()
    back = mesh_of(1, ranks, 1, 1)
    check_states(scratch, [back, *shapes, mesh_of(ranks, 1, 1, 1), back])
    return found


def compare_mixed(scratch: Path) -> dict[str, dict[str, float]]:
    """In bf16, as `mesh_ranks.compare_mixed`."""
    return mixed_distances(scratch, TWO, MIXED_MIXTURE)


def check_refusals() -> None:
    """Experts that two ranks cannot divide; a model without any stays as it is."""
    mesh = create_mesh(TWO[1])
    for family, experts, message in (
        ("Mixtral", 3, "2 does not divide the 3 of model.layers.0"),
        ("JetMoe", 4, "no layers of transformers' experts interface"),
    ):
        config = getattr(transformers, f"{family}Config")(
            vocab_size=41, hidden_size=32, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, kv_channels=8,
            num_local_experts=experts, num_experts_per_tok=2,
        )  # fmt: skip
        with torch.device("meta"):
            mixture = getattr(transformers, f"{family}ForCausalLM")(config)
        with pytest.raises(ConfigError, match=message):
            parallelize(mixture, mesh)
    dense = parallelize(model("qwen3"), mesh)
    boxes = [each.box for each in slices_of(dense.trained)]
    assert [each.box for each in slices_of(build_shell(dense, mesh).trained)] == boxes
    mesh.close()


def check_parts(learner: PolicyLearner) -> None:
    """A rank has its share of the experts, and nothing of it twice."""
    shape = learner.mesh.deployment
    copies = shape.expert_axes[0]
    for name, weight in learner.named_weights().items():
        if ".experts." in name:
            part = local_part(weight)
            assert part.numel() * shape.ranks == weight.numel() * copies, name
            assert part.untyped_storage().nbytes() == part.nbytes, name


def check_states(scratch: Path, walk: Sequence[StageDeployment]) -> None:
    """A state of one process goes through all meshes: weights and moments stay, bit for bit, and
    are published and saved as by one process."""
    learner = MIXTURES["mixture"].learner(scratch.parent, create_mesh(walk[0]))
    assert learner.restore(scratch.parent / "state") == {"policy_version": 1}
    digest, shared = (scratch.parent / "digest").read_text(), scratch / "shared"
    shared.mkdir(exist_ok=True)
    weights = load_file(scratch.parent / "state/policy/model.safetensors")
    moments = load_file(scratch.parent / "state/optimizer.safetensors")
    for place in walk[1:]:
        reshard(learner, place, learner.config)
        assert published(learner, shared) == digest
        for each in slices_of(learner.named_weights()):
            state = learner.optimizer.state[each.name]
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(state[key], moments[f"{each.name}/{key}"][each.box.index])
        if place.expert_parallel > 1:
            learner.save(scratch / "saved", {"policy_version": 1})
            saved = load_file(scratch / "saved/optimizer.safetensors")
            assert saved.keys() == moments.keys()
            assert all(torch.equal(each, moments[name]) for name, each in saved.items())
            saved = load_file(scratch / "saved/policy/model.safetensors")
            assert all(torch.equal(each, weights[name]) for name, each in saved.items())
            learner.restore(scratch / "saved")
    samples = MIXTURES["mixture"].dealt_to(learner.mesh)
    assert learner.update(samples, iteration=1)["grad_norm"] > 1e-3
    learner.mesh.close()
