"""How far the policy that trains is from the one that sampled: ages of tokens, and the weights that
correct for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from earl_core.algorithms.importance import ImportanceCorrection, weight_metrics
from earl_core.dispatch import Batch
from earl_core.learner.data.packing import TrainingSample
from earl_core.learner.data.samples import TOKEN_VERSIONS
from earl_core.tensors.collectives import Ranks

_OF_TURNS = ("turn_starts", "policy_version_first")


def age_metrics(batch: Batch | None, policy_version: int, ranks: Ranks) -> dict[str, float]:
    """Ages of the trained tokens of all ranks, in versions: that which trains less that which
    sampled the token, or the first token of its turn where only that is known.

    Returns ``age_mean``, ``age_p95`` and ``age_max``; nothing if no row has versions. Collective.
    """
    counted: Counter[int] = Counter()
    for part in ranks.gather_json(list(_ages(batch, policy_version).items())):
        counted.update({int(age): int(tokens) for age, tokens in part})
    if not counted:
        return {}
    ages = np.array(sorted(counted))
    tokens = np.array([counted[age] for age in ages.tolist()])
    upto = np.cumsum(tokens)
    return {
        "age_mean": float((ages * tokens).sum() / upto[-1]),
        "age_p95": float(ages[np.searchsorted(upto, 0.95 * upto[-1])]),
        "age_max": float(ages[-1]),
    }


def _ages(batch: Batch | None, policy_version: int) -> Counter[int]:
    """Count the trained tokens of this rank's rows by age."""
    found: Counter[int] = Counter()
    if batch is None or not {*_OF_TURNS, "loss_mask"} <= set(batch.names()):
        return found
    if TOKEN_VERSIONS in batch.names():
        for row in range(len(batch)):
            sampled = batch.row(TOKEN_VERSIONS, row)[batch.row("loss_mask", row).astype(bool)]
            versions, counts = np.unique(sampled, return_counts=True)
            ages = (policy_version - versions).tolist()
            found.update(dict(zip(ages, counts.tolist(), strict=True)))
        return found
    for row in range(len(batch)):
        starts, first = (batch.row(name, row) for name in _OF_TURNS)
        before = np.concatenate([[0], np.cumsum(batch.row("loss_mask", row), dtype=np.int64)])
        tokens = np.diff(before[[*starts.tolist(), len(before) - 1]])
        for version, count in zip(first.tolist(), tokens.tolist(), strict=True):
            # A turn without an answer has version -1, and no trained tokens.
            found[policy_version - version] += count
    return +found


def importance_metrics(
    samples: Sequence[TrainingSample], correction: ImportanceCorrection, ranks: Ranks
) -> dict[str, float]:
    """Measure the weights that correct the trained tokens of all ranks, as `weight_metrics` does.
    samples: of this rank, with old log-probs. Collective."""
    masks = [sample.loss_mask.astype(bool, copy=False) for sample in samples]
    episodes = [
        np.full(int(mask.sum()), sample.episode_id, dtype=np.int64)
        for mask, sample in zip(masks, samples, strict=True)
    ]
    ids, index = np.unique(np.concatenate([np.empty(0, np.int64), *episodes]), return_inverse=True)

    def trained(name: str) -> torch.Tensor:
        rows = [getattr(sample, name)[mask] for sample, mask in zip(samples, masks, strict=True)]
        return torch.from_numpy(np.concatenate([np.empty(0, np.float32), *rows]))

    own = correction.weights(
        trained("old_logprobs"), trained("rollout_logprobs"), torch.from_numpy(index), len(ids)
    ).numpy()
    of_all = np.concatenate(ranks.gather_rows(own)).astype(np.float64)
    numbers = np.concatenate(ranks.gather_rows(ids[index]))
    _, place, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    return weight_metrics(
        of_all, np.bincount(place, weights=of_all, minlength=len(counts)) / counts
    )
