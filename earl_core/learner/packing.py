"""From samples to packed microbatches. Pure functions over numpy arrays; no torch.

A microbatch is a flat sequence of whole samples. Nothing is padded and nothing is truncated: a
sample, or an episode that must stay whole, that exceeds the budget gets a microbatch of its own.
The only copy of a sample's tokens is the one into the pack.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Per-token columns that follow the trained tokens into the pack when they are there.
_COLUMNS = ("rollout_logprobs", "old_logprobs", "advantages", "reference_logprobs")


@dataclass(frozen=True)
class TrainingSample:
    """One row of training data; arrays are views of equal length L and are never written.

    tokens: int32 [L]. loss_mask: uint8 [L], 1 on tokens that the policy sampled. The others are
    float32 [L], meaningful where the mask is 1: rollout_logprobs under the engine, advantages,
    reference_logprobs under the frozen policy, old_logprobs under the trainer before its first
    step. None: not known, and not needed by the caller.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    rollout_logprobs: np.ndarray
    advantages: np.ndarray | None = None
    reference_logprobs: np.ndarray | None = None
    old_logprobs: np.ndarray | None = None
    episode_id: int = 0
    group_id: int = 0
    sample_id: int = 0

    def __post_init__(self) -> None:
        for name in ("loss_mask", *_COLUMNS):
            column = getattr(self, name)
            if column is not None and len(column) != len(self.tokens):
                raise ValueError(
                    f"Sample {self.sample_id} has {len(self.tokens)} tokens but {len(column)} "
                    f"values of {name}: give every column of a sample the same length."
                )


@dataclass(frozen=True)
class PackedMicrobatch:
    """Samples laid end to end: T tokens, T' of them trained, E episodes.

    rows: the samples' indices in the caller's list, in pack order, with their `lengths` and
    `trained_counts`. tokens, position_ids: int64 [T]; positions restart at every sample.
    cu_seqlens: int32 [samples + 1]. predictors: int64 [T'], where the hidden state that predicts
    the trained token stands (one before it). targets: int64 [T'], the trained tokens.
    episode_ids: int64 [E], ascending; episode_index: int64 [T'], into it. columns: float32 [T'].
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    trained_counts: tuple[int, ...]
    tokens: np.ndarray
    position_ids: np.ndarray
    cu_seqlens: np.ndarray
    predictors: np.ndarray
    targets: np.ndarray
    episode_ids: np.ndarray
    episode_index: np.ndarray
    columns: dict[str, np.ndarray]

    def split_by_row(self, values: np.ndarray) -> list[np.ndarray]:
        """Cut an array over the trained tokens [T'] into one array per row, in pack order."""
        return np.split(values, np.cumsum(self.trained_counts)[:-1])


def plan_microbatches(
    lengths: Sequence[int] | np.ndarray,
    budget: int,
    *,
    keep_together: Sequence[int] | np.ndarray | None = None,
) -> list[list[int]]:
    """Distribute samples over microbatches of at most `budget` tokens where possible.

    Best-fit decreasing: longest unit first into the microbatch with the least room that still
    takes it; ties by index, so the plan depends on the arguments only. `keep_together` gives a
    label per sample (its episode): samples with one label share a microbatch. A unit longer than
    the budget is alone in its own. Inside a microbatch samples stand longest first, which lets
    attention batch equal lengths without copies. O(n log n).
    """
    if budget < 1:
        raise ValueError(f"max_tokens_per_microbatch must be at least 1, not {budget}.")
    sizes = np.asarray(lengths, dtype=np.int64)
    if sizes.size and sizes.min() < 1:
        raise ValueError(f"Sample {int(sizes.argmin())} of the list has no tokens: leave it out.")
    labels = np.arange(sizes.size) if keep_together is None else np.asarray(keep_together)
    _, unit_of = np.unique(labels, return_inverse=True)
    unit_sizes = np.bincount(unit_of, weights=sizes).astype(np.int64)
    first_row = np.full(unit_sizes.size, sizes.size)
    np.minimum.at(first_row, unit_of, np.arange(sizes.size))
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for unit in np.lexsort((first_row, -unit_sizes)):
        size = int(unit_sizes[unit])
        place = bisect_left(room, (size, -1))
        if place < len(room):
            left, number = room.pop(place)
            bins[number].append(int(unit))
        else:
            left, number = max(budget, size), len(bins)
            bins.append([int(unit)])
        if left > size:
            insort(room, (left - size, number))
    bin_of_unit = np.empty(unit_sizes.size, dtype=np.int64)
    for number, units in enumerate(bins):
        bin_of_unit[units] = number
    plan: list[list[int]] = [[] for _ in bins]
    for row in np.argsort(-sizes, kind="stable"):
        plan[bin_of_unit[unit_of[row]]].append(int(row))
    return plan


def pack(samples: Sequence[TrainingSample], rows: Sequence[int]) -> PackedMicrobatch:
    """Copy the chosen samples into one microbatch.

    Raises ValueError when a sample's first token is trained: nothing predicts it.
    """
    chosen = [samples[row] for row in rows]
    lengths = np.array([len(sample.tokens) for sample in chosen], dtype=np.int64)
    starts = np.zeros(lengths.size + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    tokens = np.empty(int(starts[-1]), dtype=np.int64)
    mask = np.empty(tokens.size, dtype=bool)
    for sample, start, stop in zip(chosen, starts[:-1], starts[1:], strict=True):
        tokens[start:stop] = sample.tokens
        mask[start:stop] = sample.loss_mask
    for row, sample_start in zip(rows, starts[:-1], strict=True):
        if mask[sample_start]:
            raise ValueError(
                f"Sample {samples[row].sample_id} trains its first token, which nothing predicts: "
                "every sample must begin with a given token."
            )
    trained = np.flatnonzero(mask)
    row_of_trained = np.searchsorted(starts, trained, side="right") - 1
    episode_ids, episode_of_row = np.unique(
        np.array([sample.episode_id for sample in chosen], dtype=np.int64), return_inverse=True
    )
    return PackedMicrobatch(
        rows=tuple(rows),
        lengths=tuple(int(length) for length in lengths),
        trained_counts=tuple(np.bincount(row_of_trained, minlength=len(chosen)).tolist()),
        tokens=tokens,
        position_ids=np.arange(tokens.size) - np.repeat(starts[:-1], lengths),
        cu_seqlens=starts.astype(np.int32),
        predictors=trained - 1,
        targets=tokens[trained],
        episode_ids=episode_ids,
        episode_index=episode_of_row[row_of_trained],
        columns=_trained_columns(chosen),
    )


def _trained_columns(chosen: Sequence[TrainingSample]) -> dict[str, np.ndarray]:
    columns: dict[str, np.ndarray] = {}
    masks = [sample.loss_mask.astype(bool, copy=False) for sample in chosen]
    for name in _COLUMNS:
        parts = [getattr(sample, name) for sample in chosen]
        if any(part is None for part in parts):
            continue
        selected = [part[mask] for part, mask in zip(parts, masks, strict=True)]
        columns[name] = np.concatenate(selected).astype(np.float32, copy=False)
    return columns
