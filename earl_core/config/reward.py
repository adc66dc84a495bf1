"""Functions that score the episodes, and the settings of their processes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from pydantic import Field, model_validator

from earl_core.config.environment import Label
from earl_core.system.settings import Options, Settings
from earl_core.system.wait import LATER, Wait

_BESIDE_WAITING = 30.0
"""Seconds of a stage that waits for scores in which it does everything else."""


class RewardFunctionConfig(Settings):
    """One function that scores whole episodes."""

    function: str = Field(
        description="Scorer of episodes: judge or reward_model (models behind an endpoint), later "
        "(a score that people or a slow grader give in a while, by files or an endpoint), or the "
        "import path `package.module:function` of a function that is called as "
        "score(episode, **options) and returns a number, or a number and a dict."
    )
    label: Label | None = Field(
        default=None, description="Name in metrics; None: the last part of function."
    )
    weight: float = Field(
        default=1.0, description="Weight of the score in the reward; 0: it is logged only."
    )
    environments: tuple[str, ...] = Field(
        default=(),
        description="Labels of the environments whose episodes are scored; none: all of them.",
    )
    options: Options = Field(
        default_factory=dict,
        description="Options of the function; references (env:NAME, file:PATH) are replaced.",
    )

    @property
    def title(self) -> str:
        """Its label, or what stands for it."""
        return self.label or re.split(r"[:.]", self.function)[-1]

    @property
    def comes_later(self) -> bool:
        """True when its scores are waited for."""
        return self.function == LATER

    @property
    def wait(self) -> Wait:
        """How long, where they are."""
        return Wait.of(self.options)

    def scores(self, environment: str) -> bool:
        """Tell whether the function scores the episodes of the environment with this label."""
        return not self.environments or environment in self.environments


class RewardConfig(Settings):
    """An episode's reward: what its environment gave, and the scores of functions, by weight."""

    functions: tuple[RewardFunctionConfig, ...] = Field(
        default=(),
        description="Functions whose scores are added to the reward; by default the "
        "environment's reward is all.",
    )
    environment_weight: float = Field(
        default=1.0,
        description="Weight of the environment's own reward; 0: the functions replace it.",
    )
    python: str | None = Field(
        default=None,
        description="Path of another Python interpreter for the functions, as environment.python.",
    )
    hosts: int = Field(
        default=1,
        ge=1,
        description="Number of processes that run the functions, for each experience rank and "
        "each engine that evaluates.",
    )
    concurrency: int = Field(
        default=32,
        ge=1,
        description="Scores that are computed at the same time, for each of these ranks and "
        "engines.",
    )
    timeout_seconds: float = Field(
        default=60.0, gt=0, description="Time limit of one score, beyond which it has failed."
    )
    retries: int = Field(
        default=3,
        ge=0,
        description="Further attempts at a score that failed, after 1, 2, 4, ... s.",
    )
    max_failed_share: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Share of episodes without a reward above which the stage fails; None: "
        "rollout.max_failed_share.",
    )

    @model_validator(mode="after")
    def _labels(self) -> RewardConfig:
        titles = Counter(each.title for each in self.functions)
        for title in (title for title, times in titles.items() if times > 1):
            raise ValueError(f"reward.functions have the label {title!r} twice: give each its own")
        for each in self.functions:
            if each.comes_later:
                Wait.of(each.options)
                self._check_look(each)
        return self

    def _check_look(self, function: RewardFunctionConfig) -> None:
        given = function.options.get("timeout_seconds", self.timeout_seconds)
        if type(given) not in (int, float) or not 0 < given <= self.timeout_seconds:
            raise ValueError(
                f"reward.functions: {function.title!r} has timeout_seconds {given!r}: give a "
                f"number of seconds up to reward.timeout_seconds ({self.timeout_seconds:g}), or "
                "raise that"
            )

    def check_run(self, scored_by: Mapping[str, Iterable[str]], seconds: float) -> None:
        """Raise `ValueError` where scores are waited for longer than a stage may take, or one of
        the functions that score a suite is missing. scored_by: of suites, by label. seconds: of a
        stage."""
        for suite, titles in scored_by.items():
            self._check_suite(suite, titles)
        for each in self.functions:
            if not each.comes_later:
                continue
            # The last look begins at the deadline.
            needed = each.wait.deadline + self.timeout_seconds + _BESIDE_WAITING
            if needed >= seconds:
                raise ValueError(
                    f"reward.functions: {each.title!r} waits for {each.wait.deadline:g} s "
                    f"(deadline_seconds) and {self.timeout_seconds:g} s more for a last look "
                    f"(reward.timeout_seconds), and a stage may take {seconds:g} s: raise "
                    f"deadlines.stage above {needed:g}"
                )

    def added(self, scores: Mapping[str, float]) -> float:
        """Return the sum that the functions' scores, by label, add to an episode's reward."""
        weights = {each.title: each.weight for each in self.functions}
        return sum(weights[label] * score for label, score in scores.items())

    def _check_suite(self, suite: str, titles: Iterable[str]) -> None:
        known = [each.title for each in self.functions]
        for title in titles:
            if title not in known:
                listed = ", ".join(known) or "no functions"
                raise ValueError(
                    f"evaluation.suites: {suite!r} is scored_by {title!r}, but reward.functions "
                    f"has {listed}: correct it, or add the function"
                )
            if next(each for each in self.functions if each.title == title).comes_later:
                raise ValueError(
                    f"evaluation.suites: {suite!r} is scored_by {title!r}, which nobody waits for "
                    "in an evaluation: score the suite by another function"
                )

    def unrewarded(self, weights: Mapping[str, float]) -> list[str]:
        """Environments whose episodes get no reward. weights: of their own rewards, by label."""
        return [
            label
            for label, weight in weights.items()
            if not weight and not any(each.weight and each.scores(label) for each in self.functions)
        ]

    def check_environments(self, learnt_from: Mapping[str, bool]) -> None:
        """Raise `ValueError` for functions of environments that a run has not, and where nothing
        would be learnt.

        learnt_from: of each environment, by its label ("" for the only one), whether its own
        rewards count, or a reference teaches.
        """
        known = set(learnt_from)
        for each in self.functions:
            if unknown := sorted(set(each.environments) - known):
                listed = ", ".join(sorted(known - {""})) or "one environment, which has no label"
                raise ValueError(
                    f"reward.functions: {each.title!r} is for the environment {unknown[0]!r}, but "
                    f"the run has {listed}: correct it, or leave `environments` out"
                )
        for label in (label for label, learnt in learnt_from.items() if not learnt):
            if not any(each.weight and each.scores(label) for each in self.functions):
                where = f" in the environment {label!r}" if label else ""
                raise ValueError(
                    f"reward.environment_weight is 0 and no function has a weight{where}, so every "
                    "reward would be 0: add a function to reward.functions, raise the weight, or "
                    "learn from a reference alone (algorithm.kl)"
                )
