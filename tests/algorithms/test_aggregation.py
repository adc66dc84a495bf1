"""Aggregations and the whole objective: a split minibatch has the same loss and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from earl_core.algorithms.aggregation import AGGREGATIONS, Totals
from earl_core.algorithms.kl import KL_ESTIMATORS
from earl_core.algorithms.objective import Objective
from earl_core.algorithms.policy_losses import POLICY_LOSSES, LossInputs
from tests.algorithms.reference import aggregate, policy_terms

SPECS: list[dict[str, Any]] = [
    {"name": "token_mean"},
    {"name": "sequence_mean_token_mean"},
    {"name": "sequence_mean_token_sum"},
    {"name": "constant", "length": 32},
]
every_aggregation = pytest.mark.parametrize("spec", SPECS, ids=lambda s: s["name"])
counts_of_episodes = st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any)


def index_of(counts: list[int]) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))


@every_aggregation
@given(counts=counts_of_episodes, seed=st.integers(0, 10**6))
def test_against_plain_means(spec: dict[str, Any], counts: list[int], seed: int) -> None:
    totals, index = Totals.from_token_counts(counts), index_of(counts)
    weights = AGGREGATIONS.build(spec).weights(torch.tensor(counts), index, totals)
    assert weights.dtype == torch.float32
    losses = torch.randn(sum(counts), generator=torch.Generator().manual_seed(seed))
    expected = aggregate(spec, [list(part) for part in torch.split(losses, counts)])
    torch.testing.assert_close((weights * losses).sum(), expected, rtol=1e-5, atol=1e-6)


@every_aggregation
@given(counts=counts_of_episodes, data=st.data())
def test_tokens_may_be_anywhere(
    spec: dict[str, Any], counts: list[int], data: st.DataObject
) -> None:
    """Weights of any subset of tokens, in any order, are those tokens' weights of the whole."""
    totals, index = Totals.from_token_counts(counts), index_of(counts)
    aggregation = AGGREGATIONS.build(spec)
    whole = aggregation.weights(torch.tensor(counts), index, totals)
    chosen = torch.tensor(
        data.draw(st.lists(st.integers(0, len(index) - 1), unique=True)), dtype=torch.int64
    )
    part = aggregation.weights(torch.tensor(counts), index[chosen], totals)
    assert part.tolist() == whole[chosen].tolist()


def test_weights_of_the_means_sum_to_one() -> None:
    counts = [3, 0, 1, 7]
    totals, index = Totals.from_token_counts(counts), index_of(counts)
    assert totals == Totals(n_tokens=11, n_episodes=3)
    for name in ("token_mean", "sequence_mean_token_mean"):
        weights = AGGREGATIONS.build(name).weights(torch.tensor(counts), index, totals)
        assert weights.sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize(("tokens", "episodes"), [(0, 0), (5, 0), (2, 3)])
def test_impossible_totals_are_refused(tokens: int, episodes: int) -> None:
    with pytest.raises(ValueError, match="skip empty minibatches"):
        Totals(tokens, episodes)


class Minibatch:
    """Random tokens and a tiny model with shared parameters, so that gradients accumulate."""

    def __init__(self, seed: int, counts: list[int]) -> None:
        draw = torch.Generator().manual_seed(seed)
        total = sum(counts)
        self.counts, self.index = counts, index_of(counts)
        self.features = torch.randn(total, 4, generator=draw)
        self.labels = torch.randint(0, 5, (total,), generator=draw)
        self.weight = torch.randn(4, 5, generator=draw)
        noise = torch.randn(3, total, generator=draw) * 0.3
        with torch.no_grad():
            base = self.forward(self.weight, torch.arange(total))[0]
        self.old, self.reference = base + noise[0], base + noise[1]
        self.advantages = torch.randn(len(counts), generator=draw)
        self.importance = torch.rand(total, generator=draw) * 2

    def forward(
        self, weight: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = (self.features[rows] @ weight).log_softmax(-1)
        chosen = logprobs.gather(1, self.labels[rows, None])[:, 0]
        return chosen, -(logprobs.exp() * logprobs).sum(-1)

    def run(
        self, objective: Objective, parts: list[list[int]]
    ) -> tuple[float, torch.Tensor, dict[str, float]]:
        """Loss, gradient and metrics with these episodes in each microbatch."""
        weight = self.weight.clone().requires_grad_()
        totals = Totals.from_token_counts(self.counts)
        loss, metrics = 0.0, dict[str, float]()
        for episodes in parts:
            where = torch.tensor(episodes, dtype=torch.int64)
            local = torch.full((len(self.counts),), -1).scatter_(
                0, where, torch.arange(len(episodes))
            )
            rows = torch.nonzero(torch.isin(self.index, where))[:, 0]
            logprobs, entropy = self.forward(weight, rows)
            inputs = LossInputs(
                logprobs,
                self.old[rows],
                self.advantages[self.index[rows]],
                local[self.index[rows]],
                len(episodes),
                self.importance[rows],
            )
            result = objective.microbatch(
                inputs,
                torch.tensor([self.counts[e] for e in episodes], dtype=torch.int64),
                totals,
                reference_logprobs=self.reference[rows],
                entropy=entropy,
            )
            result.loss.backward()  # type: ignore[no-untyped-call]
            loss += result.loss.item()
            for name, value in result.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + value.item()
        assert weight.grad is not None
        return loss, weight.grad, metrics


def objective(policy: str, aggregation: dict[str, Any], kl: str) -> Objective:
    return Objective(
        POLICY_LOSSES.build(policy),
        AGGREGATIONS.build(aggregation),
        KL_ESTIMATORS.build(kl),
        0.05,
        0.01,
    )


@every_aggregation
@pytest.mark.parametrize(
    ("policy", "kl"), [("policy_gradient", "k1"), ("ppo_clip", "k2"), ("gspo", "k3")]
)
@settings(max_examples=25)
@given(counts=counts_of_episodes, seed=st.integers(0, 10**6), data=st.data())
def test_splitting_changes_nothing(
    spec: dict[str, Any], policy: str, kl: str, counts: list[int], seed: int, data: st.DataObject
) -> None:
    batch, target = Minibatch(seed, counts), objective(policy, spec, kl)
    places = data.draw(st.lists(st.integers(0, 2), min_size=len(counts), max_size=len(counts)))
    parts = [[e for e, place in enumerate(places) if place == p] for p in range(3)]
    loss, gradient, metrics = batch.run(target, [list(range(len(counts)))])
    split_loss, split_gradient, split_metrics = batch.run(target, parts)
    assert split_loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(split_gradient, gradient, rtol=1e-5, atol=1e-6)
    assert split_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    parts_of_loss = sum(metrics[f"loss/{part}"] for part in ("policy", "kl", "entropy"))
    assert parts_of_loss == pytest.approx(loss, rel=1e-4, abs=1e-6)


@every_aggregation
def test_the_whole_objective_against_plain_scalars(spec: dict[str, Any]) -> None:
    batch = Minibatch(5, [3, 1, 4])
    target = objective("ppo_clip", spec, "k2")
    loss, gradient, metrics = batch.run(target, [[0, 1, 2]])
    weight = batch.weight.clone().requires_grad_()
    logprobs, entropy = batch.forward(weight, torch.arange(8))
    episodes = []
    for e in range(3):
        mine = batch.index == e
        terms = policy_terms(
            {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
            {
                "logprobs": logprobs[mine],
                "old_logprobs": batch.old[mine],
                "advantages": batch.advantages[batch.index[mine]],
                "importance_weights": batch.importance[mine],
            },
        )
        kl = 0.5 * (logprobs - batch.reference)[mine] ** 2
        episodes.append(
            [t + 0.05 * k - 0.01 * h for t, k, h in zip(terms, kl, entropy[mine], strict=True)]
        )
    expected = aggregate(spec, episodes)
    expected.backward()  # type: ignore[no-untyped-call]
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient, weight.grad, rtol=1e-4, atol=1e-6)
    assert metrics["entropy"] == pytest.approx(entropy.mean().item(), rel=1e-5)
    assert metrics["ratio"] == pytest.approx((logprobs - batch.old).exp().mean().item(), rel=1e-4)


def test_missing_inputs_of_configured_terms_are_named() -> None:
    tokens = LossInputs(torch.zeros(2), torch.zeros(2), torch.zeros(2), torch.zeros(2).long(), 1)
    policy, aggregation = POLICY_LOSSES.build("ppo_clip"), AGGREGATIONS.build("token_mean")
    counts, totals = torch.tensor([2]), Totals(2, 1)
    with pytest.raises(ValueError, match="reference_logprobs"):
        Objective(policy, aggregation, KL_ESTIMATORS.build("k3"), 0.1).microbatch(
            tokens, counts, totals
        )
    with pytest.raises(ValueError, match="needs `entropy`"):
        Objective(policy, aggregation, entropy_coefficient=0.1).microbatch(tokens, counts, totals)
    with pytest.raises(ValueError, match=r"needs an estimator, and has the coefficient 0\.1"):
        Objective(policy, aggregation, None, 0.1)
