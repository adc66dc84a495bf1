"""Context parallelism: any cut of a pack gives what one process gives."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from earl_core.learner.attention import attention_plan, varlen_cuda
from earl_core.learner.attention.attention_plan import SampleBoundaries
from earl_core.learner.attention.context_parallel import (
    ContextCut,
    ContextGroup,
    PackExchange,
    gather_trained,
    share_of,
)
from earl_core.learner.attention.varlen import varlen_attention
from earl_core.learner.data.packing import pack
from earl_core.learner.data.prefix_tree import PrefixTree, TokenRun, build_tree, cut_tree
from earl_core.learner.microbatches import Feed
from earl_core.learner.staging import Staging
from tests.learner.helpers import random_samples
from tests.learner.launched import launch
from tests.learner.test_prefix_tree import branching

CPU = torch.device("cpu")
RANKS = 4
TREES = st.tuples(st.integers(0, 10**6), st.integers(1, 25), st.sampled_from([1, 8, 32]))


def pairs(run: TokenRun) -> int:
    """(query, key) pairs that causal attention computes for the run's tokens."""
    return run.length * run.depth + run.length * (run.length + 1) // 2


def tree_of(drawn: tuple[int, int, int]) -> PrefixTree:
    seed, count, least_shared = drawn
    return build_tree([sample.tokens for sample in branching(seed, count)], least_shared)


def place(rank: int, size: int) -> ContextGroup:
    return ContextGroup(rank, size, None)


@given(TREES, st.lists(st.integers(0, 3000), max_size=8))
def test_a_cut_tree_is_the_same_tree(drawn: tuple[int, int, int], edges: list[int]) -> None:
    tree = tree_of(drawn)
    cut = cut_tree(tree, sorted(edges))
    assert cut.size == tree.size
    assert sum(pairs(run) for run in cut.runs) == sum(pairs(run) for run in tree.runs)
    for sample in range(len(tree.last_run)):
        assert np.array_equal(cut.positions(sample), tree.positions(sample))
    start = 0
    for index, run in enumerate(cut.runs):
        assert (run.start, run.parent < index) == (start, True)
        assert run.depth == (0 if run.parent < 0 else cut.path(run.parent).size)
        start += run.length
        assert not any(run.start < edge < start for edge in edges)
    assert cut_tree(tree, [0, tree.size]) == tree


@given(TREES, st.integers(1, 8))
def test_ranks_hold_every_token_and_every_trained_token_once(
    drawn: tuple[int, int, int], size: int
) -> None:
    samples = branching(*drawn[:2])
    packed = pack(samples, range(len(samples)))
    shares = [share_of(packed, place(rank, size), np.empty) for rank in range(size)]
    cut = shares[0].exchange.cut
    places = [cut.positions(rank) for rank in range(size)]
    assert sorted(np.concatenate(places)) == list(range(packed.tokens.size))
    assert max(cut.counts) - min(cut.counts) <= 2
    gathered = np.full(size * shares[0].most, -1)
    for rank, (share, mine) in enumerate(zip(shares, places, strict=True)):
        # A rank without tokens still has one to run the model on.
        mine = mine if mine.size else np.zeros(1, dtype=np.int64)
        assert np.array_equal(share.tokens, packed.tokens[mine])
        assert np.array_equal(share.position_ids, packed.position_ids[mine])
        assert np.array_equal(mine[share.predictors], packed.predictors[share.trained])
        assert np.array_equal(share.targets, packed.targets[share.trained])
        first = rank * share.most
        gathered[first : first + share.trained.size] = share.trained
    assert np.array_equal(gathered[shares[0].order], np.arange(packed.targets.size))


@given(TREES, st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_attention_of_the_parts_is_that_of_the_whole(
    drawn: tuple[int, int, int], size: int
) -> None:
    tree = tree_of(drawn)
    generator = torch.Generator().manual_seed(drawn[0])
    query = torch.randn(1, 4, tree.size, 8, generator=generator)
    key, value = torch.randn(2, 1, 2, tree.size, 8, generator=generator)
    whole = attention(query, key, value, SampleBoundaries.from_tree(tree))
    for rank in range(size):
        part = boundaries_of(tree, rank, size)
        mine = torch.from_numpy(ContextCut.even(tree.size, size).positions(rank))
        if mine.numel():
            found = attention(query[:, :, mine], key, value, part)
            torch.testing.assert_close(found, whole[:, mine], atol=2e-6, rtol=1e-5)
        assert part.cu_seqlens[-1] == mine.numel()


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, boundaries: SampleBoundaries
) -> torch.Tensor:
    return varlen_attention(
        torch.nn.Module(), query, key, value, None, sample_boundaries=boundaries
    )[0]


def boundaries_of(tree: PrefixTree, rank: int, size: int) -> SampleBoundaries:
    """A rank's boundaries, for keys that are all there already."""
    exchange = PackExchange(place(rank, size), ContextCut.even(tree.size, size))
    return dataclasses.replace(SampleBoundaries.from_tree(tree, exchange=exchange), exchange=None)


def reference_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_queries: torch.Tensor,
    cu_keys: torch.Tensor,
    longest: int,
    longest_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """What the CUDA kernel computes: causal, aligned to the last key."""
    assert (query.shape[0], key.shape[0]) == (cu_queries[-1], cu_keys[-1])
    parts = []
    for index in range(cu_queries.numel() - 1):
        q = query[cu_queries[index] : cu_queries[index + 1]].transpose(0, 1)
        k, v = (
            states[cu_keys[index] : cu_keys[index + 1]]
            .transpose(0, 1)
            .repeat_interleave(query.shape[1] // key.shape[1], 0)
            for states in (key, value)
        )
        rows, columns = q.shape[1], k.shape[1]
        assert rows <= longest
        assert columns <= longest_keys
        hidden = torch.ones(rows, columns, dtype=torch.bool).triu(columns - rows + 1)
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(hidden, float("-inf"))
        parts.append((torch.softmax(scores, -1) @ v).transpose(0, 1))
    return torch.cat(parts)


@given(TREES, st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_calls_of_the_varlen_kernel_cover_the_part(drawn: tuple[int, int, int], size: int) -> None:
    tree = tree_of(drawn)
    query = torch.randn(1, 4, tree.size, 8)
    key, value = torch.randn(2, 1, 2, tree.size, 8)
    whole = attention(query, key, value, SampleBoundaries.from_tree(tree))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_plan, "kernel_calls_wanted", lambda device: True)
        patch.setattr(varlen_cuda, "usable", lambda *states: True)
        patch.setattr("torch.nn.attention.varlen.varlen_attn", reference_varlen)
        one_process = SampleBoundaries.from_tree(tree)
        assert len(one_process.calls) == 1
        torch.testing.assert_close(attention(query, key, value, one_process), whole)
        for rank in range(size):
            part = boundaries_of(tree, rank, size)
            mine = torch.from_numpy(ContextCut.even(tree.size, size).positions(rank))
            if mine.numel():
                found = attention(query[:, :, mine], key, value, part)
                torch.testing.assert_close(found, whole[:, mine], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("size", [2, 4])
def test_a_long_sample_takes_two_calls_without_a_copy_of_its_keys(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_plan, "kernel_calls_wanted", lambda device: True)
    tree = separate(4096)
    for rank in range(size):
        part = boundaries_of(tree, rank, size)
        # Neighbouring stretches, on the last rank, are two runs all the same.
        assert len(part.calls) == 2
        for call in part.calls:
            assert call.keys.places is None
            assert call.keys.start == 0
        for bucket in part.buckets:
            assert bucket.keys.places is None
            assert bucket.queries.places is None


def separate(*lengths: int) -> PrefixTree:
    starts = np.cumsum([0, *lengths]).tolist()
    runs = tuple(TokenRun(start, n, 0, -1) for start, n in zip(starts, lengths, strict=False))
    return PrefixTree(runs, tuple(range(len(runs))))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_causal_work_of_a_long_sample_is_balanced(size: int) -> None:
    tree = separate(32768)
    cut = ContextCut.even(tree.size, size)
    owners = cut.owners
    work = np.zeros(size)
    for run in cut_tree(tree, cut.edges).runs:
        work[owners[run.start]] += pairs(run)
    assert work.sum() == 32768 * 32769 / 2
    # Stretches in their order instead would give the last rank nearly twice the mean.
    assert work.max() / work.mean() < 1.001
    assert set(cut.counts) == {32768 // size}


def mesh(rank: int, size: int) -> SimpleNamespace:
    return SimpleNamespace(
        deployment=SimpleNamespace(context_parallel=size),
        context_rank=rank,
        group=lambda name: None,
    )


@pytest.mark.parametrize("staged", [False, True])
def test_the_feed_gives_a_rank_its_part(staged: bool) -> None:
    samples = random_samples(12, longest=90)
    plan = [[0, 3, 5], [1], [2, 4, 6, 7, 8], [9, 10, 11]]
    for rank in range(3):
        feed = Feed(CPU, mesh(rank, 3))
        if staged:
            feed._stagings = (Staging(CPU), Staging(CPU))
        for fed, rows in zip(feed.microbatches(samples, plan), plan, strict=True):
            packed = pack(samples, rows)
            share = share_of(packed, place(rank, 3), np.empty)
            assert fed.context is not None
            assert fed.context.most == share.most
            assert fed.tensors.boundaries.exchange == share.exchange
            for found, expected in (
                (fed.tensors.tokens, share.tokens),
                (fed.tensors.position_ids, share.position_ids),
                (fed.tensors.predictors, share.predictors),
                (fed.tensors.targets, share.targets),
                (fed.context.trained, share.trained),
                (fed.context.order, share.order),
                (fed.episode_index, packed.episode_index),
                (fed.columns["advantages"], packed.columns["advantages"]),
            ):
                assert torch.equal(found, torch.from_numpy(expected))


def test_without_context_ranks_nothing_changes() -> None:
    samples = random_samples(3)
    (fed,) = Feed(CPU, mesh(0, 1)).microbatches(samples, [[0, 1, 2]])
    assert fed.context is None
    assert fed.tensors.boundaries.exchange is None
    values = torch.randn(fed.tensors.targets.numel())
    assert gather_trained(values, fed.context) is values


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """What each of four ranks found; see `context_ranks`."""
    scratch = tmp_path_factory.mktemp("ranks")
    return launch("tests.learner.context_ranks", "compare", RANKS, scratch, 180.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["attention", "llama", "qwen2", "gpt2", "mistral"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_equal_one_process(differences: list[dict[str, float]], size: int, kind: str) -> None:
    for rank, found in enumerate(differences):
        mine = {name: x for name, x in found.items() if name.startswith(f"c={size} {kind}")}
        assert len(mine) >= 16
        wrong = {name: x for name, x in mine.items() if not x <= 1e-6}
        assert not wrong, f"rank {rank}"


@pytest.mark.slow
def test_gathered_keys_do_not_wait_for_the_backward_pass(
    differences: list[dict[str, float]],
) -> None:
    for found in differences:
        kept = [alive for name, alive in found.items() if " kept " in name]
        assert kept == [0.0] * 8
