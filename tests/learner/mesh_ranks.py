"""What `test_mesh_equality` does in several ranks: each mesh against what one process computed."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import fsdp  # noqa: F401  (imported before the ranks part)

from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.learner.data.packing import TrainingSample
from earl_core.learner.parallel.mesh import UpdateMesh, create_mesh
from earl_core.learner.parallel_model import build_shell
from earl_core.learner.policy_learner import PolicyLearner, UpdateRefused
from earl_core.tensors.slices import local_part, slices_of
from tests.learner.cuts import mesh_of, meshes
from tests.learner.helpers import save_model
from tests.learner.mesh_cases import CASES, MIXED, Case, model
from tests.learner.vocabulary_ranks import compare_vocabularies
from tests.learnt import assert_learnt

# Of time and memory, and of the cut into microbatches.
UNEQUAL = (
    "microbatches",
    "tokens_per_second",
    "update_seconds",
    "peak_rss_bytes",
    "padding_share",
    "shared_prefix_share",
)


def prepare(scratch: Path) -> None:
    """Write the models, and what one process computes in each case."""
    for kind in ("llama", "qwen2", "qwen3"):
        save_model(model(kind), scratch / kind)
    exact = dataclasses.replace(MIXED, update={**MIXED.update, "precision": "fp32"})
    compute_alone(scratch, CASES | {"mixed": MIXED, "exact": exact})


def compute_alone(scratch: Path, cases: dict[str, Case]) -> None:
    """Write what one process computes in each case."""
    for name, case in cases.items():
        learner = case.learner(scratch)
        before = {name: weight.clone() for name, weight in learner.named_weights().items()}
        found = result_of(case, learner)
        assert_learnt(gradient_norms(found), before, learner.named_weights())
        save_file(
            {key: value.contiguous() for key, value in found.items()},
            scratch / f"{name}.safetensors",
        )


def gradient_norms(found: dict[str, torch.Tensor]) -> list[float]:
    """Of each step, of one process's result."""
    steps = {key.partition(" ")[0] for key in found if key.startswith("gradient")}
    return [
        math.sqrt(sum(float((v**2).sum()) for k, v in found.items() if k.startswith(f"{step} ")))
        for step in sorted(steps)
    ]


def result_of(case: Case, learner: PolicyLearner) -> dict[str, torch.Tensor]:
    """This rank's parts of weights, moments and each step's gradients; its samples' scores before
    the update; everyone's metrics.
    """
    samples = case.dealt_to(learner.mesh)
    scores = learner.score(samples)
    gradients = _recorded_gradients(learner)
    metrics = learner.update(case.scored(samples, scores), iteration=0)
    assert len({name.partition(" ")[0] for name in gradients}) == 3
    found = {
        f"score {sample.sample_id}": torch.from_numpy(values)
        for sample, values in zip(samples, scores, strict=True)
    }
    for name, weight in learner.parallel.trained.items():
        found[f"weight {name}"] = local_part(weight)
        for key, value in learner.optimizer.state[name].items():
            found[f"{key} {name}"] = value
    for name, value in metrics.items():
        if name not in UNEQUAL:
            kind = "loss" if name.startswith("loss") or name == "grad_norm" else "metric"
            found[f"{kind} {name}"] = torch.tensor(value, dtype=torch.float64)
    return found | gradients


def _recorded_gradients(learner: PolicyLearner) -> dict[str, torch.Tensor]:
    """Filled as the learner steps: "gradient<step> name", this rank's part."""
    gradients: dict[str, torch.Tensor] = {}
    original = learner.optimizer.step

    steps = itertools.count()

    def step() -> None:
        number = next(steps)
        for name, parameter in learner.parallel.trained.items():
            assert parameter.grad is not None
            gradients[f"gradient{number} {name}"] = local_part(parameter.grad).clone()
        original()

    learner.optimizer.step = step
    return gradients


def differences(case: Case, learner: PolicyLearner, alone: Path) -> dict[str, float]:
    """The largest difference of each kind of number between this rank's parts and the whole, of
    which one process has written the file.

    Absolute, and relative for numbers above 1.
    """
    expected = load_file(alone)
    found = result_of(case, learner)
    boxes = {each.name: each.box for each in slices_of(learner.named_weights())}
    largest: dict[str, float] = {}
    for key, value in found.items():
        kind, _, what = key.partition(" ")
        whole = expected[key]
        if what in boxes and kind != "step":
            whole = whole[boxes[what].index]
        assert whole.shape == value.shape, (key, whole.shape, value.shape)
        gap = (whole.double() - value.double()).abs() / whole.double().abs().clamp(min=1.0)
        largest[kind] = max(largest.get(kind, 0.0), float(gap.max()) if gap.numel() else 0.0)
    numbers = {key for key in expected if key.startswith(("metric", "loss"))}
    assert numbers == {key for key in found if key.startswith(("metric", "loss"))}
    return largest


def compare(scratch: Path) -> dict[str, float]:
    """Every mesh of the world in every case; {"mesh case kind": difference from one process}."""
    torch.set_num_threads(1)
    found: dict[str, float] = {}
    for shape in meshes(int(os.environ["WORLD_SIZE"])):
        mesh = create_mesh(shape)
        for name in CASES:
            learner = CASES[name].learner(scratch.parent, mesh)
            alone = scratch.parent / f"{name}.safetensors"
            for kind, difference in differences(CASES[name], learner, alone).items():
                found[f"{shape} {name} {kind}"] = difference
        if shape.ranks == 2 or (shape.tensor_parallel > 1 and shape.parts > 1):
            check_behaviour(learner, scratch.parent)
        if shape.tensor_parallel == shape.ranks:
            found |= compare_vocabularies(mesh)
        mesh.close()
    return found


def compare_mixed_pairs(scratch: Path) -> dict[str, dict[str, float]]:
    """As `compare_mixed`, for tensor ranks beside shards and beside context ranks."""
    return mixed_distances(scratch, [mesh_of(1, 2, 1, 2), mesh_of(1, 1, 2, 2)])


def compare_mixed(scratch: Path) -> dict[str, dict[str, float]]:
    """Meshes in bf16: how far gradients and scores are from one process's, of their norm; the same
    of one process's from float32's ("rounding"). By mesh, then by kind; `exact`: no sample and no
    matrix is shared.
    """
    # The others of four ranks do as with two.
    every = meshes(int(os.environ["WORLD_SIZE"]))
    return mixed_distances(
        scratch, [each for each in every if max(each.axes) < 4 or each.shard == 4]
    )


def mixed_distances(
    scratch: Path,
    shapes: Sequence[StageDeployment],
    case: Case = MIXED,
    names: tuple[str, str] = ("mixed", "exact"),
) -> dict[str, dict[str, float]]:
    """See `compare_mixed`. names: of what one process computed in the case, and in float32."""
    torch.set_num_threads(1)
    mixed, exact = (load_file(scratch.parent / f"{name}.safetensors") for name in names)
    found = {}
    for shape in shapes:
        mesh = create_mesh(shape)
        learner = case.learner(scratch.parent, mesh)
        assert {weight.dtype for weight in learner.named_weights().values()} == {torch.float32}
        result = result_of(case, learner)
        boxes = {each.name: each.box for each in slices_of(learner.named_weights())}
        parts: dict[str, list[torch.Tensor]] = {}
        for key, value in result.items():
            kind, _, what = key.partition(" ")
            if kind.startswith("gradient") or kind == "score":
                index = boxes[what].index if what in boxes else slice(None)
                row = (value, mixed[key][index], exact[key][index])
                parts.setdefault(kind, []).append(torch.stack([x.double().view(-1) for x in row]))
        shared = (shape.context_parallel, shape.tensor_parallel, shape.expert_parallel)
        distances = {"exact": float(max(shared) == 1)}
        for kind, several in parts.items():
            ours, theirs, unrounded = torch.cat(several, dim=1)
            distances[kind] = float((ours - theirs).norm() / theirs.norm())
            distances[f"{kind} rounding"] = float((theirs - unrounded).norm() / theirs.norm())
        found[str(shape)] = distances
        check_shell(learner, mesh)
        mesh.close()
    return found


def check_behaviour(learner: PolicyLearner, scratch: Path) -> None:
    """What else a learner on a mesh promises; raises AssertionError."""
    mesh, case = learner.mesh, CASES["gspo_tied"]
    check_parts(learner)
    check_shell(learner, mesh)
    if mesh.deployment.tensor_parallel > 1:
        check_tokens(learner, case.dealt_to(mesh))
    samples = case.dealt_to(mesh)
    if mesh.data_rank == 0:
        broken = np.full_like(samples[0].advantages, np.inf)
        samples[0] = dataclasses.replace(samples[0], advantages=broken)
    learner = dataclasses.replace(case, update={"minibatches": 1}).learner(scratch, mesh)
    before = [local_part(weight).clone() for weight in learner.named_weights().values()]
    with pytest.raises(UpdateRefused, match="gradient"):
        learner.update(samples, iteration=0)
    assert all(map(torch.equal, before, map(local_part, learner.named_weights().values())))
    if mesh.deployment.data_parallel > 1:
        torn = [dataclasses.replace(sample, episode_id=0) for sample in samples]
        with pytest.raises(ValueError, match="Episode 0 has samples on several ranks"):
            learner.update(torn, iteration=0)


def check_tokens(learner: PolicyLearner, samples: list[TrainingSample]) -> None:
    """Between the matrices a tensor rank has its part of the tokens; the matrices see all."""
    mesh, layer = learner.mesh, learner.model.model.layers[-1]
    seen: dict[str, list[int]] = {"norm": [], "matrix": [], "layer": []}
    handles = [
        module.register_forward_hook(
            lambda _, given, found, name=name: seen[name].append(found.shape[1])
        )
        for name, module in (
            ("norm", layer.post_attention_layernorm),
            ("matrix", layer.mlp.up_proj),
            ("layer", layer),
        )
    ]
    learner.score(samples)
    for handle in handles:
        handle.remove()
    assert max(seen["matrix"]) > 1
    for norm, matrix, left in zip(*seen.values(), strict=True):
        most = -(-matrix // mesh.deployment.tensor_parallel)
        assert norm == left == min(most, max(0, matrix - mesh.tensor_rank * most))


def check_parts(learner: PolicyLearner) -> None:
    """Between calls a rank holds its own parts only."""
    shape = learner.mesh.deployment
    whole = sum(weight.numel() for weight in learner.named_weights().values())
    own = sum(local_part(weight).numel() for weight in learner.named_weights().values())
    # Norms are not split over tensor ranks, and parts of few rows are uneven.
    assert own <= 1.2 * whole / shape.parts / shape.tensor_parallel + 64 * 16
    storage = sum(
        local_part(weight).untyped_storage().nbytes() for weight in learner.named_weights().values()
    )
    assert storage <= 4 * (own + 64 * 40)


def check_shell(learner: PolicyLearner, mesh: UpdateMesh) -> None:
    """A shell of the same mesh has the same parts, and nothing in them."""
    shell = build_shell(learner.parallel, mesh).model
    theirs = slices_of(dict(shell.named_parameters()))
    ours = slices_of(dict(learner.named_parameters()))
    assert [each.name for each in ours] == [each.name for each in theirs]
    for our, their in zip(ours, theirs, strict=True):
        assert (our.box, our.shape) == (their.box, their.shape), our.name
        assert their.tensor.is_meta
