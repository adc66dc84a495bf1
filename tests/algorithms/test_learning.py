"""All estimators, losses and aggregations together: a policy of a few numbers learns its game."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from earl_core.algorithms.advantages import ADVANTAGE_ESTIMATORS
from earl_core.algorithms.aggregation import AGGREGATIONS, Totals
from earl_core.algorithms.importance import ImportanceCorrection
from earl_core.algorithms.kl import KL_ESTIMATORS
from earl_core.algorithms.objective import Objective
from earl_core.algorithms.policy_losses import POLICY_LOSSES, LossInputs
from tests.algorithms.central import compute_advantages

PROMPTS, ACTIONS, TURNS, GROUP = 3, 4, 2, 8


def play(logits: torch.Tensor, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Actions int64 [E, TURNS] of GROUP episodes a prompt, rewards [E]: 1 a right turn."""
    probabilities = logits.detach().softmax(-1).repeat_interleave(GROUP, 0).flatten(0, 1)
    actions = torch.multinomial(probabilities, 1, generator=draw).view(-1, TURNS)
    right = torch.arange(PROMPTS).repeat_interleave(GROUP)[:, None] % ACTIONS
    return actions, (actions == right).double().sum(-1)


def train(
    estimator_spec: Any, loss_spec: Any, aggregation_spec: Any, iterations: int = 40
) -> float:
    """Mean reward of the last iterations; chance is TURNS / ACTIONS = 0.5, the best is 2."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.zeros(PROMPTS, TURNS, ACTIONS, requires_grad=True)
    reference = logits.detach().log_softmax(-1)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    estimator = ADVANTAGE_ESTIMATORS.build(estimator_spec)
    objective = Objective(
        POLICY_LOSSES.build(loss_spec),
        AGGREGATIONS.build(aggregation_spec),
        KL_ESTIMATORS.build("k2"),
        0.01,
    )
    episodes = PROMPTS * GROUP
    prompt = torch.arange(PROMPTS).repeat_interleave(GROUP)
    index = torch.arange(episodes).repeat_interleave(TURNS)
    counts = torch.full((episodes,), TURNS)
    history = []
    for _ in range(iterations):
        actions, rewards = play(logits, draw)
        history.append(rewards.mean().item())
        advantages = compute_advantages(estimator, rewards.numpy(), prompt.numpy(), counts.numpy())

        def chosen(table: torch.Tensor, actions: torch.Tensor = actions) -> torch.Tensor:
            return table.log_softmax(-1)[prompt].gather(2, actions[:, :, None]).flatten()

        old = chosen(logits).detach()
        for _ in range(2):
            inputs = LossInputs(
                chosen(logits),
                old,
                torch.from_numpy(advantages).float(),
                index,
                episodes,
                ImportanceCorrection().weights(old, old + 0.01, index, episodes),
                old + 0.01,
            )
            result = objective.microbatch(
                inputs,
                counts,
                Totals.from_token_counts(counts.tolist()),
                reference_logprobs=chosen(reference),
            )
            optimizer.zero_grad()
            result.loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return sum(history[-5:]) / 5


# Every estimator's gradient is in `tests/conformance`.
@pytest.mark.parametrize(
    ("estimator", "loss"),
    [
        ("rloo", "policy_gradient"),
        ("grpo", "ppo_clip"),
        ("reinforce_plus_plus", "ppo_clip"),
        ("grpo", "cispo"),
        ("rloo", "dppo"),
        ("grpo", "sapo"),
    ],
)
def test_estimators_and_losses_learn_together(estimator: str, loss: str) -> None:
    assert train(estimator, loss, "token_mean") > 1.5


@pytest.mark.parametrize("aggregation", AGGREGATIONS.names())
def test_gspo_learns_with_every_aggregation(aggregation: str) -> None:
    spec = {"name": aggregation, "length": 4} if aggregation == "constant" else aggregation
    assert train("grpo", {"name": "gspo", "clip_low": 0.2, "clip_high": 0.3}, spec) > 1.5
