"""What each source of rewards gave the episodes of a rank, for the guard."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from earl_core.dispatch.reads.batch import Batch
from earl_core.experience.roles import own_rows, shared_of
from earl_core.guard.seen import (
    HUGE,
    Bounds,
    Given,
    Seen,
    environment_source,
    function_source,
)


def seen_rewards(
    batch: Batch,
    scored: Mapping[int, Mapping[str, float]] | None,
    invalid: Mapping[str, Sequence[int]],
    bounds: Mapping[str, Bounds],
    again: Collection[int],
) -> dict[str, Seen]:
    """Summaries by source. batch: holds all samples of its episodes. scored: scores of functions,
    by label, of the episodes that have a reward; None: no functions. invalid: episodes of which a
    function, by its label, gave no number. bounds: of sources; the others have none but `HUGE`.
    again: groups that were told of in an earlier iteration."""
    ids, first, inverse = np.unique(
        batch.scalars("episode_id"), return_index=True, return_inverse=True
    )
    own = own_rows(batch)
    paid = np.array([each.astype(np.float64).sum() for each in batch.list_rows("turn_rewards")])
    returns = np.bincount(inverse, weights=paid * own, minlength=len(ids)) + shared_of(batch)[first]
    labels, prompts = batch.strings("environment"), batch.scalars("prompt_id")[first].tolist()
    of_episode = [
        (labels[row], prompt) for row, prompt in zip(first.tolist(), prompts, strict=True)
    ]
    groups = batch.scalars("group_id")[first]
    counted = ~np.isin(groups, list(again))
    new = set(ids[counted].tolist())
    found: dict[str, Seen] = {}

    def add(source: str, rewards: np.ndarray, there: np.ndarray, bad: Sequence[int] = ()) -> None:
        at = np.flatnonzero(there & counted)
        named = [of_episode[place] for place in at.tolist()]
        failed = [number for number in bad if number in new]
        given = Given(rewards[at], ids[at], groups[at], named, failed)
        found[source] = Seen.of(given, bounds.get(source, HUGE))

    for label in sorted({label for label, _ in of_episode}):
        add(environment_source(label), returns, np.array([each[0] == label for each in of_episode]))
    given = scored or {}
    for title in sorted({title for scores in given.values() for title in scores} | set(invalid)):
        scores = [given.get(number, {}).get(title) for number in ids.tolist()]
        there = np.array([score is not None for score in scores])
        rewards = np.array([0.0 if score is None else score for score in scores])
        add(function_source(title), rewards, there, invalid.get(title, ()))
    return found
