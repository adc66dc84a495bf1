"""The beginnings of rows of a batch after which engines are asked for the likeliest token.

They are bounded, so that the question costs little beside an iteration, and do not depend on which
rank has which row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from earl_core.learner.data.packing import TrainingSample
from earl_core.weights.probe import Prefixes

_ROWS, _OF_A_ROW = 8, 16
"""Most rows, and most beginnings of each."""

_LONGEST, _TOKENS = 256, 1024
"""Tokens of a row, and of all rows, at most: so long that blocks of a prefix cache are hit."""


def candidates(samples: Sequence[TrainingSample], iteration: int) -> list[dict[str, Any]]:
    """Draw some of a rank's rows, by a hash of the iteration and the row. Returns JSON."""
    drawn = sorted((_draw(iteration, each.sample_id), i) for i, each in enumerate(samples))
    return [
        {"draw": draw, "sample": samples[i].sample_id, **_beginnings(samples[i])}
        for draw, i in drawn[:_ROWS]
    ]


def chosen(every: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Choose from the candidates of all ranks; dumped `Prefixes`."""
    rows = {each["sample"]: each for of_rank in every for each in of_rank}
    found: list[dict[str, Any]] = []
    tokens = 0
    for row in sorted(rows.values(), key=lambda each: (each["draw"], each["sample"]))[:_ROWS]:
        tokens += len(row["tokens"])
        if found and tokens > _TOKENS:
            break
        found.append({"tokens": row["tokens"], "lengths": row["lengths"]})
    return found


def as_samples(rows: Sequence[Prefixes]) -> list[TrainingSample]:
    """Rows whose trained tokens are those after the beginnings; what they are is left open."""
    samples = []
    for number, row in enumerate(rows):
        tokens = np.array([*row.tokens, 0], dtype=np.int32)
        mask = np.zeros(len(tokens), dtype=np.uint8)
        mask[list(row.lengths)] = 1
        nothing = np.zeros(len(tokens), dtype=np.float32)
        samples.append(TrainingSample(tokens, mask, nothing, episode_id=number, sample_id=number))
    return samples


def _draw(iteration: int, sample: int) -> int:
    return xxhash.xxh3_64_intdigest(f"probe|{iteration}|{sample}".encode())


def _beginnings(sample: TrainingSample) -> dict[str, list[int]]:
    """Beginnings that a trained token follows, evenly spread; the longest possible one where the
    first answer comes later."""
    follows = np.flatnonzero(sample.loss_mask)
    near = follows[(follows > 0) & (follows <= _LONGEST)]
    if not near.size:
        near = np.array([min(len(sample.tokens), _LONGEST)])
    places = np.linspace(0, near.size - 1, min(near.size, _OF_A_ROW)).round().astype(int)
    lengths = near[places].tolist()
    return {"tokens": sample.tokens[: lengths[-1]].tolist(), "lengths": lengths}
