"""Packing of samples into microbatches that share prefixes: pure functions over numpy arrays.

A microbatch is a flat sequence of whole samples. Nothing is padded and nothing is truncated: a
sample, or an episode that must stay whole, that exceeds the budget gets a microbatch of its own.
The only copy of a sample's tokens is the one into the pack.

Tokens that several samples begin with are computed once. The episodes of a group start from one
prompt, and all episodes of an environment from one instruction. A causal model gives equal prefixes
equal hidden states, so a pack holds each shared stretch once, as a tree of runs; attention lets a
run see its ancestors and itself, and gradients of all samples add up in the shared run. The result
is that of separate samples, but for the order of sums. The idea is prefix-grouped training (arXiv
2506.05433), here for prefixes of any depth and any samples, not only the prompt of a group.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from earl_core.learner.data.masks import PackedMasks, pack_masks
from earl_core.learner.data.prefix_tree import (
    LEAST_SHARED,
    PrefixTree,
    build_tree,
    identities,
    sort_by_prefix,
)
from earl_core.pretrained.grammars import TokenMasks
from earl_core.trajectory.routing import RecordedRouting

Allocate = Callable[[int, str], np.ndarray]
"""(count, dtype) → an uninitialised one-dimensional array: where the pack's numbers go."""

# Every run that continues a shared one has copies of its keys and values in each layer; so many of
# them take about the memory of one computed token's activations.
_KEYS_PER_TOKEN = 16

# Per-token columns that follow the trained tokens into the pack when they are there.
_COLUMNS = (
    *("rollout_logprobs", "old_logprobs", "advantages", "reference_logprobs", "current"),
    *("kl_coefficient", "values"),
)


@dataclass(frozen=True)
class TrainingSample:
    """One row of training data; arrays are views of equal length L and are never written.

    tokens: int32 [L]. loss_mask: uint8 [L], 1 on tokens that the policy sampled. The others are
    float32 [L], meaningful where the mask is 1: rollout_logprobs under the engine, advantages,
    reference_logprobs under the frozen policy, old_logprobs under the trainer before its first
    step. None: not known, and not needed by the caller. current: uint8 [L], 1 on tokens that the
    policy about to be updated sampled, 0 on an older one's; None: no older one's are among them.
    values: of the critic, before its update.
    kl_coefficient: None where it is equal for all samples of a batch. masks: of tokens that were
    sampled under a grammar. episode_id: what a loss counts as one episode (`data.parts`). routing:
    the experts that each token was given; None: the model's routers choose.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    rollout_logprobs: np.ndarray
    advantages: np.ndarray | None = None
    reference_logprobs: np.ndarray | None = None
    old_logprobs: np.ndarray | None = None
    current: np.ndarray | None = None
    kl_coefficient: np.ndarray | None = None
    values: np.ndarray | None = None
    masks: TokenMasks | None = None
    routing: RecordedRouting | None = None
    episode_id: int = 0
    group_id: int = 0
    sample_id: int = 0

    def __post_init__(self) -> None:
        for name in ("loss_mask", "routing", *_COLUMNS):
            column = getattr(self, name)
            if column is not None and len(column) != len(self.tokens):
                raise ValueError(
                    f"Sample {self.sample_id} has {len(self.tokens)} tokens but {len(column)} "
                    f"values of {name}: give every column of a sample the same length."
                )

    @property
    def identity(self) -> np.ndarray:
        """What samples must share to be computed once; see `identities`."""
        return identities(self.tokens, None if self.routing is None else self.routing.hashes)


FILLER = TrainingSample(
    tokens=np.zeros(2, dtype=np.int32),
    loss_mask=np.array([0, 1], dtype=np.uint8),
    rollout_logprobs=np.zeros(2, dtype=np.float32),
)
"""The sample that a rank computes, times nothing, where others have a microbatch more than it."""


@dataclass(frozen=True)
class PackedMicrobatch:
    """Samples laid end to end: T tokens, T' trained ones over all samples, E episodes.

    rows: the samples' indices in the caller's list, with their `lengths` and `trained_counts`.
    tree: which stretch of the pack belongs to which sample; T is less than the sum of the lengths
    when samples share their beginnings. tokens, position_ids: int64 [T]; a position is the
    token's place in its sample. predictors: int64 [T'], row after row, where the hidden state that
    predicts the trained token stands (one before it). targets: int64 [T'], the trained tokens.
    episode_ids: int64 [E], ascending; episode_index: int64 [T'], into it. columns: float32 [T'].
    masks: of the trained tokens that were sampled under a grammar, if there are any. routing:
    [n, width], of the tokens that `pack` was asked for, and copies: float32 [T], how many samples
    have the token, where all have a routing.

    A worked example: two samples, of the episodes 3 and 2, whose last two tokens are trained:

        tokens         5 40 41  7  9     5 40  8  6
        position_ids   0  1  2  3  4     0  1  2  3
        predictors     2  3              6  7
        targets        7  9              8  6
        episode_ids    2 3
        episode_index  1  1              0  0
        lengths = 5, 4; trained_counts = 2, 2

    Had both begun with the same 32 tokens or more, the pack would hold those once.
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    trained_counts: tuple[int, ...]
    tokens: np.ndarray
    position_ids: np.ndarray
    tree: PrefixTree
    predictors: np.ndarray
    targets: np.ndarray
    episode_ids: np.ndarray
    episode_index: np.ndarray
    columns: dict[str, np.ndarray]
    masks: PackedMasks | None = None
    routing: np.ndarray | None = None
    copies: np.ndarray | None = None

    def split_by_row(self, values: np.ndarray) -> list[np.ndarray]:
        """Cut an array over the trained tokens [T'] into one array per row of `rows`."""
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


def plan_shared(
    tokens: Sequence[np.ndarray],
    budget: int,
    *,
    keep_together: Sequence[int] | np.ndarray | None = None,
) -> list[list[int]]:
    """Like `plan_microbatches`, for samples whose `identities` are known: those with one beginning
    share a microbatch, and the budget counts what is computed after sharing, and the copies of
    shared keys and values at what they take.

    Units (samples, or episodes that stay whole) are taken in the lexicographic order of their
    first sample. Falls back to `plan_microbatches` where sharing saves less than a twentieth.
    """
    lengths = np.array([len(sample) for sample in tokens], dtype=np.int64)
    plan = plan_microbatches(lengths, budget, keep_together=keep_together)
    labels = range(len(tokens)) if keep_together is None else keep_together
    order, shared = sort_by_prefix(tokens)
    if shared[shared >= LEAST_SHARED].sum() < lengths.sum() / 20:
        return plan
    units: dict[int, list[int]] = {}
    for row in order:
        units.setdefault(int(labels[row]), []).append(row)
    sharing: list[list[int]] = []
    total = bound = budget
    for unit in units.values():
        added = int(lengths[unit].sum())
        total, bound = total + added, bound + added
        # Nothing costs more than separate samples; the exact cost is asked for where it decides.
        if sharing and bound > budget:
            tree = build_tree([tokens[row] for row in (*sharing[-1], *unit)])
            bound = tree.size + (total - tree.size) // _KEYS_PER_TOKEN
        if sharing and bound <= budget:
            sharing[-1].extend(unit)
        else:
            sharing.append(list(unit))
            total = bound = added
    return sharing


def plan_rows(
    samples: Sequence[TrainingSample], rows: Sequence[int], budget: int, whole_episodes: bool
) -> list[list[int]]:
    """Divide these of the samples into microbatches, as `plan_shared` does."""
    together = [samples[row].episode_id for row in rows]
    plan = plan_shared(
        [samples[row].identity for row in rows],
        budget,
        keep_together=together if whole_episodes else None,
    )
    return [[rows[index] for index in part] for part in plan]


def pack(
    samples: Sequence[TrainingSample],
    rows: Sequence[int],
    allocate: Allocate = np.empty,
    routed: Callable[[int], np.ndarray] = np.arange,
) -> PackedMicrobatch:
    """Copy the chosen samples into one microbatch.

    allocate: gives the memory of `tokens`, `position_ids`, `predictors`, `targets`, `episode_index`
    and the columns, which can be a buffer that a device reads from. routed: of a pack of so many
    tokens, the places of those whose routing is read, ascending; of a token that samples share, it
    is read once.

    Raises ValueError when a sample's first token is trained: nothing predicts it; `RoutingError`
    where a routing is of another model.
    """
    chosen = [samples[row] for row in rows]
    tree = build_tree([sample.identity for sample in chosen])
    tokens, position_ids = (allocate(tree.size, "int64") for _ in range(2))
    places = [tree.positions(index) for index in range(len(chosen))]
    for sample, place in zip(chosen, places, strict=True):
        tokens[place] = sample.tokens
        position_ids[place] = np.arange(place.size)
    routing, copies = _packed_routing(chosen, tree, routed(tree.size), allocate), None
    if routing is not None:
        copies = allocate(tree.size, "float32")
        copies[:] = tree.copies()
    trained = [np.flatnonzero(sample.loss_mask) for sample in chosen]
    for sample, at in zip(chosen, trained, strict=True):
        if at.size and at[0] == 0:
            raise ValueError(
                f"Sample {sample.sample_id} trains its first token, which nothing predicts: "
                "every sample must begin with a given token."
            )
    counts = [at.size for at in trained]
    count = sum(counts)
    predictors, targets, episode_index = (allocate(count, "int64") for _ in range(3))
    episode_ids, episode_of_row = np.unique(
        np.array([sample.episode_id for sample in chosen], dtype=np.int64), return_inverse=True
    )
    before = [place[at - 1] for place, at in zip(places, trained, strict=True)]
    np.concatenate(before, out=predictors)
    np.concatenate([s.tokens[at] for s, at in zip(chosen, trained, strict=True)], out=targets)
    episode_index[:] = np.repeat(episode_of_row, counts)
    return PackedMicrobatch(
        rows=tuple(rows),
        lengths=tuple(len(sample.tokens) for sample in chosen),
        trained_counts=tuple(counts),
        tokens=tokens,
        position_ids=position_ids,
        tree=tree,
        predictors=predictors,
        targets=targets,
        episode_ids=episode_ids,
        episode_index=episode_index,
        columns=_trained_columns(chosen, count, allocate),
        masks=pack_masks([sample.masks for sample in chosen], trained),
        routing=routing,
        copies=copies,
    )


def _packed_routing(
    chosen: Sequence[TrainingSample], tree: PrefixTree, places: np.ndarray, allocate: Allocate
) -> np.ndarray | None:
    """The routing of the tokens at these places of the pack; None where a sample has none."""
    recorded = [sample.routing for sample in chosen if sample.routing is not None]
    if len(recorded) < len(chosen):
        return None
    shape = recorded[0].shape
    routing = allocate(places.size * shape.width, shape.dtype).reshape(-1, shape.width)
    for run, holder in zip(tree.runs, tree.holders(), strict=True):
        first, last = np.searchsorted(places, [run.start, run.start + run.length])
        if first < last:
            own = places[first:last] - run.start + run.depth
            routing[first:last] = recorded[holder].read(own)
    return routing


def _trained_columns(
    chosen: Sequence[TrainingSample], count: int, allocate: Allocate
) -> dict[str, np.ndarray]:
    columns: dict[str, np.ndarray] = {}
    masks = [sample.loss_mask.astype(bool, copy=False) for sample in chosen]
    for name in _COLUMNS:
        parts = [getattr(sample, name) for sample in chosen]
        if any(part is None for part in parts):
            continue
        column = columns[name] = allocate(count, "float32")
        np.concatenate([part[mask] for part, mask in zip(parts, masks, strict=True)], out=column)
    return columns
