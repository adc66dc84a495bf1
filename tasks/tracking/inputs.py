"""Data sets of a run's MLflow run: the environments, suites and data set files that it plays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

import xxhash

from earl_core.config import RunConfig
from earl_core.config.environment import EnvironmentConfig
from earl_core.secrets import redact_tree, shareable, shareable_tree
from earl_core.system.files import canonical_json


class PlayedInput(NamedTuple):
    """An input that MLflow calls a data set. source: JSON. context: `training` or `evaluation`."""

    name: str
    digest: str
    source: str
    context: str


def played_inputs(config: RunConfig) -> Iterator[PlayedInput]:
    """Yield the inputs of training and of evaluation; the digest is of the name and the options,
    which belong to a run, and not of the rows of a data set, which may be large."""
    trained = config.environments or ((config.environment,) if config.environment else ())
    for each in trained:
        yield _played(each, each.options, getattr(each, "label", ""), "training")
    settings = config.evaluation
    if settings.every and config.environment is not None:
        options = {**config.environment.options, **settings.options}
        yield _played(config.environment, options, "held-out", "evaluation")
    for suite in settings.suites if settings.every else ():
        yield _played(suite, suite.options, suite.label, "evaluation")


def _played(
    environment: EnvironmentConfig, options: dict[str, object], label: str, context: str
) -> PlayedInput:
    name = environment.name or environment.agent or ""
    source = {"environment": name, "options": redact_tree(options), "tools": environment.tools}
    digest = xxhash.xxh3_64_hexdigest(canonical_json(source))
    title = f"{name} ({label})" if label else name
    return PlayedInput(
        shareable(title), digest, json.dumps(shareable_tree(source), default=str), context
    )
