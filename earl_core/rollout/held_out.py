"""Held-out episodes: prompts and seeds that training never uses, the same in every evaluation."""

from __future__ import annotations

from earl_core.config import RunConfig
from earl_core.config.environment import SuiteConfig
from earl_core.rollout.mixture import draw
from earl_core.trajectory.samples import EpisodeSpec, derive_seed

HELD_OUT_PROMPTS = 2**40
"""Evaluations play prompts from here on; training never gets that far. Even, so that games that
take the side from the prompt's parity start with the same side as in training."""


def evaluation_specs(config: RunConfig, numbers: range) -> list[EpisodeSpec]:
    """One episode for each number; several environments have their parts by their weights."""
    if config.environments:
        draws = draw(config.mixture, {}, None, numbers.stop)[0][numbers.start :]
    else:
        draws = [("", number) for number in numbers]
    return [
        EpisodeSpec(
            episode_id=HELD_OUT_PROMPTS + number,
            group_id=HELD_OUT_PROMPTS + number,
            prompt_id=HELD_OUT_PROMPTS + prompt,
            seed=derive_seed(config.seed, "evaluation", HELD_OUT_PROMPTS + number),
            environment=label,
        )
        for number, (label, prompt) in zip(numbers, draws, strict=True)
    ]


def suite_specs(suite: SuiteConfig, seed: int, numbers: range) -> list[EpisodeSpec]:
    """All attempts at the prompts of these numbers. seed: the run's."""
    return [
        EpisodeSpec(
            episode_id=HELD_OUT_PROMPTS + number * suite.attempts + attempt,
            group_id=number,
            prompt_id=HELD_OUT_PROMPTS + number,
            seed=derive_seed(seed, "suite", suite.label, number, attempt),
            environment=suite.label,
        )
        for number in numbers
        for attempt in range(suite.attempts)
    ]
