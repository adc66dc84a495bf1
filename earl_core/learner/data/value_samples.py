"""Samples of a critic: the same rows, whose trained tokens are time steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from earl_core.dispatch import Batch
from earl_core.learner.data.packing import TrainingSample
from earl_core.learner.data.parts import ROLE
from earl_core.learner.data.samples import SCORED, training_samples

VALUED = (*SCORED, ROLE, "advantages", "values")
"""Columns of a sample that a critic is trained on."""


def value_samples(batch: Batch, in_turns: bool) -> list[TrainingSample]:
    """One for each row as `training_samples` makes them, whose trained tokens are time steps.

    in_turns: they are turns: the first trained token of each stands for it.
    """
    samples = training_samples(batch, [None] * len(batch))
    if not in_turns:
        return samples
    return [
        replace(sample, loss_mask=first_of_turns(sample.loss_mask, batch.row("turn_starts", row)))
        for row, sample in enumerate(samples)
    ]


def first_of_turns(mask: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The mask of the first trained token of each turn. starts: of the turns."""
    trained = np.flatnonzero(mask)
    _, first = np.unique(np.searchsorted(starts, trained, side="right"), return_index=True)
    found = np.zeros_like(mask)
    found[trained[first]] = 1
    return found
