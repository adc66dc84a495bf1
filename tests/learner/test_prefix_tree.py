"""Shared prefixes: computed once, and everything equal to samples on their own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from earl_core.config.model import ModelConfig
from earl_core.learner.attention.attention_plan import SampleBoundaries
from earl_core.learner.data.packing import TrainingSample, pack, plan_shared
from earl_core.learner.data.prefix_tree import build_tree
from earl_core.learner.loading import load_policy
from earl_core.learner.model import PackedTensors, logprobs_of_trained
from earl_core.learner.parallel.mesh import create_mesh
from tests.learner.helpers import save_model


def branching(seed: int, count: int, vocabulary: int = 40) -> list[TrainingSample]:
    """Samples that leave a common stem at random places, some of them equal or nested."""
    rng = np.random.default_rng(seed)
    stems = [rng.integers(1, vocabulary, size=rng.integers(1, 120)) for _ in range(3)]
    samples = []
    for number in range(count):
        stem = stems[rng.integers(len(stems))]
        kept = stem[: rng.integers(1, len(stem) + 1)]
        own = rng.integers(1, vocabulary, size=rng.integers(0, 60))
        tokens = np.concatenate([kept, own]).astype(np.int32)
        mask = (rng.random(tokens.size) < 0.3).astype(np.uint8)
        mask[0] = 0
        samples.append(
            TrainingSample(
                tokens,
                mask,
                rollout_logprobs=rng.normal(size=tokens.size).astype(np.float32),
                episode_id=number // 2,
                group_id=number // 4,
                sample_id=number,
            )
        )
    return samples


@settings(max_examples=150)
@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 40))
def test_paths_spell_the_samples_and_nothing_is_stored_twice(
    seed: int, count: int, least: int
) -> None:
    samples = [sample.tokens for sample in branching(seed, count, vocabulary=3)]
    tree = build_tree(samples, least)
    stored = np.full(tree.size, -1)
    for index, tokens in enumerate(samples):
        positions = tree.positions(index)
        assert positions.size == tokens.size
        assert np.isin(stored[positions], [-1]).any() or (stored[positions] == tokens).all()
        fresh = stored[positions] == -1
        assert (stored[positions][~fresh] == tokens[~fresh]).all()
        stored[positions] = tokens
    assert (stored >= 0).all()
    assert tree.size <= sum(map(len, samples))
    for run in tree.runs:
        if run.parent >= 0:
            parent = tree.runs[run.parent]
            assert run.depth == parent.depth + parent.length
            assert parent.length >= least


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.integers(1, 14), st.integers(60, 400), st.booleans())
def test_the_plan_keeps_every_sample_and_the_budget(
    seed: int, count: int, budget: int, whole: bool
) -> None:
    samples = branching(seed, count)
    episodes = [sample.episode_id for sample in samples] if whole else None
    plan = plan_shared([sample.tokens for sample in samples], budget, keep_together=episodes)
    assert sorted(row for part in plan for row in part) == list(range(count))
    for part in plan:
        units = {samples[row].episode_id if whole else row for row in part}
        size = build_tree([samples[row].tokens for row in part]).size
        assert size <= budget or len(units) == 1
        if whole:
            inside = set(part)
            assert all(
                (row in inside) == (sample.episode_id in units)
                for row, sample in enumerate(samples)
            )


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "mistral"])
@pytest.mark.parametrize("seed", [0, 1])
def test_logprobs_and_gradients_equal_those_of_single_samples(
    kind: str, seed: int, tmp_path: Path
) -> None:
    model = load_policy(ModelConfig(path=str(save_model(kind, tmp_path))), create_mesh()).model
    samples = branching(seed, 10)
    # A stem longer than the block of queries that one masked call takes.
    stem = np.random.default_rng(seed).integers(1, 40, size=300).astype(np.int32)
    for number in range(3):
        tokens = np.concatenate([stem, samples[number].tokens])
        mask = np.zeros(tokens.size, dtype=np.uint8)
        mask[300::7] = 1
        samples.append(
            TrainingSample(
                tokens, mask, np.zeros(tokens.size, dtype=np.float32), sample_id=100 + number
            )
        )
    rows = list(range(len(samples)))

    def run(parts: list[list[int]]) -> tuple[dict[int, torch.Tensor], dict[str, torch.Tensor]]:
        model.zero_grad()
        found: dict[int, torch.Tensor] = {}
        for part in parts:
            packed = pack(samples, part)
            logprobs, _ = logprobs_of_trained(
                model, PackedTensors.from_microbatch(packed), temperature=1.0
            )
            logprobs.sum().backward()
            pieces = torch.split(logprobs.detach(), list(packed.trained_counts))
            found |= dict(zip(packed.rows, pieces, strict=True))
        return found, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    shared, shared_gradients = run([rows])
    alone, alone_gradients = run([[row] for row in rows])
    assert pack(samples, rows).tokens.size < sum(len(sample.tokens) for sample in samples)
    for row in rows:
        torch.testing.assert_close(shared[row], alone[row], atol=2e-5, rtol=1e-5)
    assert shared_gradients.keys() == alone_gradients.keys()
    for key, gradient in alone_gradients.items():
        torch.testing.assert_close(shared_gradients[key], gradient, atol=5e-4, rtol=1e-4)


def test_shared_keys_for_the_varlen_kernel_are_each_runs_path() -> None:
    samples = branching(3, 8)
    tree = build_tree([sample.tokens for sample in samples], 8)
    (call,) = SampleBoundaries.from_tree(tree, "meta").calls
    assert call.cu_keys.shape[0] == len(tree.runs) + 1
    assert call.keys.places is not None
    assert call.keys.places.shape[0] == sum(tree.path(i).size for i in range(len(tree.runs)))


def test_equal_samples_cost_once() -> None:
    sample = branching(0, 1)[0]
    twins = [dataclasses.replace(sample, sample_id=number) for number in range(4)]
    packed = pack(twins, range(4))
    if sample.tokens.size >= 32:
        assert packed.tokens.size == sample.tokens.size
    assert packed.targets.size == 4 * int(sample.loss_mask.sum())
