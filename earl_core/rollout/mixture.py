"""Choice of the environment that each prompt of an iteration plays, where a run has several.

Every environment counts its own prompts, so that a data set is read row by row at whatever weight.
The counts, and what the curriculum has learnt, are the cursor: the rollout's manifest holds that of
its draws, from which the next one goes on with the rewards that came after. So a resumed run draws
what an uninterrupted one would.

Held-out episodes have prompts and seeds that training never uses, the same in every evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

from earl_core.config import RunConfig
from earl_core.config.environment import CurriculumConfig, MixedEnvironment, SuiteConfig
from earl_core.experience.group_returns import GroupReturns, Span
from earl_core.trajectory.samples import EpisodeSpec, derive_seed

_DIGITS = 9

Draw = tuple[str, int]
"""The label of an environment, and the index of a prompt there."""


class Place(BaseModel):
    """State of one environment of the mixture.

    drawn: prompts so far. due: the part of a prompt that it is still to get, negative where it got
    more than its part. spread: the moving mean of its groups' spread (0 to 0.5), None before the
    first. returns: the least and the greatest seen.
    """

    drawn: int = 0
    due: float = 0.0
    spread: float | None = None
    returns: Span | None = None


Cursor = dict[str, Place]
"""The places by label."""


def draw(
    environments: Mapping[str, MixedEnvironment],
    cursor: Mapping[str, Place],
    curriculum: CurriculumConfig | None,
    prompts: int,
) -> tuple[list[Draw], Cursor]:
    """An iteration's prompts, and the cursor after them; nothing where there is no mixture.

    The environments come in turns as even as their parts allow (smooth weighted round robin), so
    that every engine's share of the prompts is a mixture too.
    """
    if not environments:
        return [], {}
    after = {label: cursor.get(label, Place()).model_copy() for label in environments}
    parts = shares(environments, after, curriculum)
    draws = []
    for _ in range(prompts):
        for label, place in after.items():
            place.due += parts[label]
        label = max(after, key=lambda each: after[each].due)
        draws.append((label, after[label].drawn))
        after[label].drawn += 1
        after[label].due -= 1
    return draws, after


def shares(
    environments: Mapping[str, MixedEnvironment],
    cursor: Mapping[str, Place],
    curriculum: CurriculumConfig | None,
) -> dict[str, float]:
    """The part of the prompts that each environment is due; they sum to 1."""
    weights = {label: each.weight for label, each in environments.items()}
    even = _normalised(weights)
    if curriculum is None:
        return even
    spreads = {label: cursor[label].spread for label in environments}
    # What nobody has played yet may be worth as much as the best.
    hopeful = max((each for each in spreads.values() if each is not None), default=1.0)
    worth = _normalised(
        {
            label: weights[label] * (hopeful if spread is None else spread)
            for label, spread in spreads.items()
        }
    )
    least = curriculum.least_share if any(worth.values()) else 1.0
    return {label: least * even[label] + (1 - least) * worth[label] for label in environments}


def learn(
    cursor: Cursor, rewarded: Mapping[str, GroupReturns], curriculum: CurriculumConfig
) -> Cursor:
    """The cursor with what an iteration's rewards, by label, tell the curriculum."""
    return {
        label: _learnt(place, rewarded[label], curriculum.memory) if label in rewarded else place
        for label, place in cursor.items()
    }


def _learnt(place: Place, groups: GroupReturns, memory: float) -> Place:
    if not groups.spreads.count:
        return place
    returns = groups.span.merge(place.returns)
    width = returns.high - returns.low
    spread = groups.spreads.mean / width if width > 0 else 0.0
    # The last bits of the mean depend on which rank rewarded what, and draws must not.
    spread = round(spread, _DIGITS)
    if place.spread is not None:
        spread = round(memory * place.spread + (1 - memory) * spread, _DIGITS)
    return place.model_copy(update={"spread": spread, "returns": returns})


def _normalised(weights: Mapping[str, float]) -> dict[str, float]:
    whole = sum(weights.values())
    return {label: weight / whole if whole else 0.0 for label, weight in weights.items()}


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
