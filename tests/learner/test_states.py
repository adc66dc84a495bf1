"""Layers with a state over trees of runs: exact, or refused before anything is trained."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from earl_core.config.model import ModelConfig
from earl_core.deployment.stage_deployment import Checkpointing
from earl_core.learner.attention.attention_plan import SampleBoundaries
from earl_core.learner.attention.context_parallel import ContextCut, ContextGroup, PackExchange
from earl_core.learner.attention.state_plan import ConvolutionPlan, StatePlan
from earl_core.learner.compiled_layers import compile_layers
from earl_core.learner.data import packing
from earl_core.learner.data.prefix_tree import PrefixTree, TokenRun, build_tree, separate
from earl_core.learner.loading import load_policy
from earl_core.learner.model import checkpoint_activations, prepare_for_packing
from earl_core.learner.parallel.mesh import create_mesh
from earl_core.learner.parallel.tensor_parallel import check_degree
from earl_core.pretrained.huggingface import PreTrainedModel
from earl_core.pretrained.routers import routers_of, unread_routers
from earl_core.system.errors import ConfigError
from tests.families import ranks
from tests.families.cells import save
from tests.learner.helpers import random_samples, save_model, with_old_logprobs
from tests.learner.launched import launch
from tests.learner.state_models import (
    HYBRIDS,
    build_hybrid,
    build_with_vision,
    forked_samples,
    losses,
    plain_losses,
    separate_samples,
)
from tests.learner.test_policy_learner import make_learner
from tests.learner.test_prefix_tree import branching

EXACT = 5e-6


def hybrids(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same model for packs, and as transformers has it."""
    model = build_hybrid(family).eval()
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    prepare_for_packing(model)
    return model, plain


def learn(model: PreTrainedModel, compute: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Log-probs under "", and the gradients of a weighted mean of them."""
    model.zero_grad()
    found = compute()
    (found * torch.linspace(-1.0, 1.5, found.numel())).mean().backward()  # type: ignore[no-untyped-call]
    gradients = {name: each.grad for name, each in model.named_parameters()}
    assert all(grad is not None and grad.abs().max() > 0 for grad in gradients.values())
    return {"": found.detach(), **gradients}  # type: ignore[dict-item]


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= EXACT, name


@pytest.mark.parametrize("family", HYBRIDS)
def test_packs_equal_plain_transformers_one_sample_at_a_time(family: str) -> None:
    model, plain = hybrids(family)
    for samples in (separate_samples(), forked_samples()):
        tree = build_tree(samples, least_shared=1)
        found = learn(model, partial(losses, model, samples, tree))
        assert_equal(found, learn(plain, partial(plain_losses, plain, samples)))
        alone = separate([len(sample) for sample in samples])
        assert_equal(found, learn(model, partial(losses, model, samples, alone)))
    assert tree.size < 0.5 * alone.size
    ages = [0]
    for run in tree.runs[1:]:
        ages.append(ages[run.parent] + 1 if run.parent >= 0 else 0)
    assert max(ages) == 2
    assert min(run.length for run in tree.runs) == 1


@pytest.mark.parametrize("rung", ["selective", "full"])
def test_what_is_computed_again_is_the_same(rung: Checkpointing) -> None:
    model, _ = hybrids("Qwen3_5")
    samples = forked_samples()
    compute = partial(losses, model, samples, build_tree(samples, least_shared=1))
    expected = learn(model, compute)
    checkpoint_activations(model, rung)
    found = learn(model, compute)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.slow
@pytest.mark.campaign
def test_compiled_layers_compute_states_as_they_are() -> None:
    model, plain = hybrids("Qwen3_5")
    compile_layers(model)
    for samples in (separate_samples(), forked_samples()):
        tree = build_tree(samples, least_shared=1)
        found = learn(model, partial(losses, model, samples, tree))
        assert_equal(found, learn(plain, partial(plain_losses, plain, samples)))


def test_gradients_of_a_state_are_summed_in_float32() -> None:
    """In bf16 the eight branches' parts of a shared state would be lost beside the first's."""
    torch.manual_seed(0)
    model, _ = hybrids("Qwen3_5")
    tree = PrefixTree(
        (TokenRun(0, 9, 0, -1), *(TokenRun(9 + 2 * n, 2, 9, 0) for n in range(8))),
        tuple(range(1, 9)),
    )
    samples = [np.array([*range(1, 10), 3 + n, 5], dtype=np.int32) for n in range(8)]
    exact = learn(model, partial(losses, model, samples, tree))
    again = learn(model, partial(losses, model, samples, tree))
    assert all(torch.equal(value, again[name]) for name, value in exact.items())
    model.bfloat16()
    rounded = learn(model, partial(losses, model, samples, tree))
    apart = learn(model, partial(losses, model, samples, separate([11] * 8)))
    for name, value in exact.items():
        distance = [(float((each[name] - value).norm())) for each in (rounded, apart)]
        assert distance[0] <= 2 * distance[1] + 1e-3, name


@pytest.mark.parametrize("family", ["Qwen3Next", "Qwen3_5Moe"])
def test_routers_beside_states_are_replayed(family: str) -> None:
    model, _ = hybrids(family)
    routers = routers_of(model)
    assert routers is not None
    assert not unread_routers(model)
    assert (routers.shape.layers, routers.shape.chosen, routers.shape.experts) == (2, 2, 4)
    samples = forked_samples()
    tree = build_tree(samples, least_shared=1)
    compute = partial(losses, model, samples, tree)
    expected = learn(model, compute)
    chosen = routers.live()
    routers.choose(chosen.flatten(1))
    assert_equal(learn(model, compute), expected)
    routers.choose(((chosen + 1) % 4).flatten(1))
    other = learn(model, compute)
    assert (other[""] - expected[""]).abs().max() > 1e-3
    shared = [name for name in other if "shared_expert" in name]
    assert len(shared) == 8


def _no_boundaries(tree: PrefixTree, device: Any = "cpu", **options: Any) -> StatePlan:
    return PLAN(separate((tree.size,)), device, **options)


def _no_parents(tree: PrefixTree, device: Any = "cpu", **options: Any) -> StatePlan:
    runs = tuple(replace(run, parent=-1) for run in tree.runs)
    return PLAN(PrefixTree(runs, tree.last_run), device, **options)


def _no_windows(tree: PrefixTree, width: int, device: Any = "cpu") -> ConvolutionPlan:
    return ConvolutionPlan()


PLAN = StatePlan.of


@pytest.mark.parametrize(
    ("kind", "leak", "why"),
    [
        (StatePlan, _no_boundaries, "lets packed samples see each other"),
        (ConvolutionPlan, _no_windows, "lets packed samples see each other"),
        (StatePlan, _no_parents, "the state of what they share"),
    ],
)
def test_a_state_that_leaks_is_found(
    kind: Any, leak: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_hybrid("Qwen3_5")
    monkeypatch.setattr(kind, "of", leak)
    with pytest.raises(ConfigError, match=why):
        prepare_for_packing(model)


def test_the_vision_tower_of_a_released_checkpoint_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = save_model(build_hybrid("Qwen3_5"), tmp_path / "text", spread=1.0)
    whole = save_model(build_with_vision("Qwen3_5"), tmp_path / "whole", spread=1.0)
    samples = random_samples(5, seed=2)
    plain = make_learner(text).score(samples)
    assert "text only" not in caplog.text
    learner = make_learner(whole)
    named = r"text only: the vision tower \([0-9,]+ parameters\) of .*whole are neither trained"
    assert re.search(named, caplog.text)
    assert all(map(np.array_equal, learner.score(samples), plain))
    assert not any("visual" in name for name in learner.named_weights())
    before = {name: weight.clone() for name, weight in learner.named_weights().items()}
    learner.update(samples, iteration=0)
    assert any(not torch.equal(before[n], w) for n, w in learner.named_weights().items())
    learner.save(tmp_path / "saved", {})
    kept = load_policy(ModelConfig(path=str(tmp_path / "saved" / "policy")), create_mesh()).model
    for name, weight in learner.named_weights().items():
        assert torch.equal(dict(kept.named_parameters())[name], weight), name


@pytest.mark.parametrize("family", ["Qwen3_5", "Qwen3_5Moe"])
def test_sharing_of_prefixes_changes_no_weight(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two updates of two steps each."""
    directory = save_model(build_hybrid(family), tmp_path)
    samples = [
        replace(each, advantages=np.full(len(each.tokens), 1.0 - number % 3, np.float32))
        for number, each in enumerate(branching(5, 12))
    ]
    ended = []
    for shared in (True, False):
        if not shared:
            monkeypatch.setattr(packing, "build_tree", lambda rows: separate(list(map(len, rows))))
        learner = make_learner(directory, max_tokens_per_microbatch=512, minibatches=2)
        for iteration in range(2):
            metrics = learner.update(
                with_old_logprobs(samples, learner.score(samples)), iteration=iteration
            )
            assert metrics["grad_norm"] > 1e-3
        assert (metrics["shared_prefix_share"] > 0.1) == shared
        ended.append({name: each.detach() for name, each in learner.named_parameters()})
    begun = dict(build_hybrid(family).named_parameters())
    for name, weight in ended[0].items():
        assert (weight - ended[1][name]).abs().max() <= 1e-5, name
    assert all((ended[0][name] - each).abs().max() > 1e-4 for name, each in begun.items())


def test_layers_with_a_state_are_not_divided_over_ranks() -> None:
    model = build_hybrid("Qwen3_5")
    with pytest.raises(ConfigError, match="cannot be split over 2 tensor-parallel ranks"):
        check_degree(model, 2)
    tree = separate((8,))
    exchange = PackExchange(ContextGroup(0, 2, None), ContextCut.even(8, 2))
    boundaries = SampleBoundaries.from_tree(tree, exchange=exchange)
    with pytest.raises(ConfigError, match="set context_parallel to 1"):
        boundaries.plan_states((4,))


@pytest.mark.parametrize(
    ("family", "compare"), [("Qwen3_5", "compare"), ("Qwen3Next", "compare_mixture")]
)
def test_replicas_and_shards_equal_one_process(family: str, compare: str, tmp_path: Path) -> None:
    ranks.prepare(save(family, tmp_path / "model"))
    for refused in launch("tests.families.ranks", compare, 2, tmp_path / "ranks"):
        assert refused["replicas"] == refused["shards"] == refused.get("expert parallel", "") == ""
        assert "set context_parallel to 1" in refused["context parallel"]
