"""Adapter for reasoning-gym: questions made by procedures, with difficulty levels and scores."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field
from functools import lru_cache
from typing import Any, ClassVar

from earl_core.environments.base import Message, StepResult
from earl_core.environments.options import Options, at_least
from earl_core.system.errors import ConfigError
from earl_core.system.import_path import import_package

_FAR = 2**41
"""Beyond the prompts of evaluations."""


class DataSetPart(Options):
    """One of several data sets. weight: its share of the prompts. config, level: as for one."""

    name: str
    weight: float = 1.0
    config: dict[str, Any] = field(default_factory=dict)
    level: int | dict[str, int] | None = None

    def __post_init__(self) -> None:
        if self.weight <= 0:
            raise ValueError(f"weight is {self.weight:g}: give more than 0")
        _check(self.config, self.level)


class ReasoningGymOptions(Options):
    """Options of the reasoning-gym adapter.

    dataset: a data set's name, such as "chain_sum", or a list of several.
    config: settings of one data set, as reasoning-gym's configuration of it takes them.
    level: level of its curriculum, from 0 on, for all attributes, or for each by name.
    seed: random seed of the data set. size: number of its items, after which they repeat; None: a
        new one for each prompt.
    system_prompt: a name in reasoning_gym.utils.SYSTEM_PROMPTS, a text, or None.
    """

    dataset: str | tuple[DataSetPart, ...]
    config: dict[str, Any] = field(default_factory=dict)
    level: int | dict[str, int] | None = None
    seed: int = 0
    size: int | None = None
    system_prompt: str | None = "default"

    def __post_init__(self) -> None:
        if not isinstance(self.dataset, str) and (self.config or self.level is not None):
            raise ValueError("config and level are for one dataset: give them with each of several")
        if not self.dataset:
            raise ValueError("dataset is empty: name one")
        if self.size is not None:
            at_least("size", self.size, 1)
        at_least("seed", self.seed, 0)
        _check(self.config, self.level)

    @property
    def parts(self) -> tuple[DataSetPart, ...]:
        """The data sets, one or several."""
        if isinstance(self.dataset, str):
            return (DataSetPart(name=self.dataset, config=self.config, level=self.level),)
        return self.dataset


class ReasoningGymEnvironment:
    """One question, one answer, its score as the reward.

    The prompt index is the item. The answer is what stands in the last <answer> tags, else the
    whole text. `info`: `outcome` (correct with the full score, else incorrect), `metrics` (score,
    with several data sets the score of each; unscorable: the scoring raised).
    """

    options_model: ClassVar[type[ReasoningGymOptions]] = ReasoningGymOptions
    concurrent: ClassVar[bool] = False

    def __init__(self, options: ReasoningGymOptions) -> None:
        self.options = options
        library = _library()
        self._extract = library.utils.extract_answer
        self._system = library.utils.SYSTEM_PROMPTS.get(
            options.system_prompt, options.system_prompt
        )
        parts = [(part.name, part.weight, part.config, part.level) for part in options.parts]
        self._data = _data_set(json.dumps(parts), options.seed, options.size)
        self._item: Any = None

    def reset(self, prompt: int, seed: int) -> list[Message]:
        index = prompt if self.options.size is None else prompt % self.options.size
        self._item = self._data[index]
        system = self._system
        messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        return [*messages, {"role": "user", "content": self._item["question"]}]

    def step(self, text: str) -> StepResult:
        if self._item is None:
            raise RuntimeError("the question was answered or not asked yet: call reset first")
        item, self._item = self._item, None
        tagged = self._extract(text)
        unscorable = 0.0
        try:
            answer = text.strip() if tagged is None else tagged
            score = float(self._data.score_answer(answer, item))
        except Exception:  # some data sets take an answer of another form for an error
            score, unscorable = 0.0, 1.0
        metrics = {"score": score, "unscorable": unscorable}
        if len(self.options.parts) > 1:
            metrics[f"score_{item['metadata']['source_dataset']}"] = score
        outcome = "correct" if score >= 1 else "incorrect"
        outcomes = ["correct", "incorrect"]
        info = {"outcome": outcome, "outcomes": outcomes, "metrics": metrics}
        return StepResult([], score, True, info)

    def close(self) -> None:
        self._item = None


def _check(config: Mapping[str, Any], level: int | Mapping[str, int] | None) -> None:
    for name in ("seed", "size"):
        if name in config:
            raise ValueError(f"config has {name}: give it as the option {name}")
    for each in level.values() if isinstance(level, Mapping) else [level or 0]:
        at_least("level", each, 0)


def _library() -> Any:
    return import_package("reasoning_gym", "reasoning-gym")


@lru_cache(maxsize=8)
def _data_set(parts: str, seed: int, size: int | None) -> Any:
    """Made once per process, because some read large files."""
    library, sized = _library(), {} if size is None else {"size": size}
    specs = []
    for name, weight, config, level in json.loads(parts):
        if name not in library.factory.DATASETS or name == "composite":
            known = ", ".join(sorted(set(library.factory.DATASETS) - {"composite"}))
            raise ConfigError(f"reasoning-gym has no data set {name!r}", remedy=f"use {known}")
        full = config if level is None else {**_of_level(library, name, level), **config}
        specs.append(library.composite.DatasetSpec(name, weight, {**full, **sized}))
    try:
        if len(specs) == 1:
            made = library.create_dataset(specs[0].name, seed=seed, **specs[0].config)
        else:
            made = library.create_dataset("composite", seed=seed, datasets=specs, **sized)
    except Exception as error:
        raise ConfigError(
            f"the data set {', '.join(spec.name for spec in specs)} of reasoning-gym cannot be "
            f"made: {type(error).__name__}: {error}",
            remedy="correct the options dataset, config or level",
        ) from error
    if size is None:
        _check_endless(made, specs)
    return made


def _of_level(library: Any, name: str, level: int | Mapping[str, int]) -> dict[str, Any]:
    try:
        curriculum = library.factory.create_curriculum(name)
        if isinstance(level, int):
            curriculum.set_global_level(level)
        else:
            for attribute, each in level.items():
                curriculum.set_attr_level(attribute, each)
        config = dict(vars(curriculum.generate_configuration()))
    except Exception as error:
        raise ConfigError(
            f"the data set {name!r} of reasoning-gym has no level {level}: "
            f"{type(error).__name__}: {error}",
            remedy="correct the option level",
        ) from error
    return {key: value for key, value in config.items() if key not in ("seed", "size")}


def _check_endless(made: Any, specs: list[Any]) -> None:
    """Raises ConfigError where a data set has a number of items, because prompts go on."""
    for name, data in getattr(made, "datasets", {specs[0].name: made}).items():
        try:
            data[_FAR]
        except Exception as error:
            raise ConfigError(
                f"the data set {name!r} of reasoning-gym does not go on for ever "
                f"({type(error).__name__}: {error})",
                remedy="give its number of items in the option size",
            ) from error
