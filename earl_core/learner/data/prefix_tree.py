"""The tree of samples that begin alike: which stretches of a pack are computed once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# A shared stretch shorter than this costs more in a run of its own than it saves.
LEAST_SHARED = 32


@dataclass(frozen=True)
class TokenRun:
    """A stretch of the pack that one or more samples have at the same place.

    start: its first token's place in the pack. length: its tokens. depth: tokens of its samples
    before it, which is the position id of its first token. parent: index of the run that it
    continues, -1 for the beginning of a sample.
    """

    start: int
    length: int
    depth: int
    parent: int


@dataclass(frozen=True)
class PrefixTree:
    """Runs in pack order, parents before children, and for each sample the run that it ends in.
    last_run: -1 never occurs, because every sample has at least one token."""

    runs: tuple[TokenRun, ...]
    last_run: tuple[int, ...]

    @property
    def size(self) -> int:
        """Tokens that are computed."""
        return sum(run.length for run in self.runs)

    def path(self, run: int) -> np.ndarray:
        """Pack positions of a run's ancestors and of itself, in sample order; int64."""
        parts = []
        while run >= 0:
            item = self.runs[run]
            parts.append(np.arange(item.start, item.start + item.length))
            run = item.parent
        return np.concatenate(parts[::-1])

    def copies(self) -> np.ndarray:
        """How many samples have each token of the pack, int64 [size]."""
        counts = np.zeros(len(self.runs), dtype=np.int64)
        for run in self.last_run:
            counts[run] += 1
        for run in range(len(self.runs) - 1, -1, -1):
            if (parent := self.runs[run].parent) >= 0:
                counts[parent] += counts[run]
        return np.repeat(counts, [run.length for run in self.runs])

    def holders(self) -> list[int]:
        """The first sample that has each run."""
        found = [-1] * len(self.runs)
        for sample, run in enumerate(self.last_run):
            while run >= 0 and found[run] < 0:
                found[run] = sample
                run = self.runs[run].parent
        return found

    def positions(self, sample: int) -> np.ndarray:
        """Return the places of a sample's tokens in the pack, int64 [tokens of the sample]."""
        return self.path(self.last_run[sample])


def build_tree(samples: Sequence[np.ndarray], least_shared: int = LEAST_SHARED) -> PrefixTree:
    """The tree of samples (`identities`, none empty) whose shared runs have `least_shared` tokens
    or more. Without any, the runs are the samples in the given order.
    """
    order, shared = sort_by_prefix(samples)
    if not (shared >= least_shared).any():
        return separate([len(sample) for sample in samples])
    runs: list[TokenRun] = []
    last_run = [-1] * len(samples)
    size = 0
    # (first, stop) of the sorted samples that share `depth` tokens, held by `parent`.
    stack = [(0, len(samples), 0, -1)]
    while stack:
        first, stop, depth, parent = stack.pop()
        alone = stop - first == 1
        common = len(samples[order[first]]) if alone else int(shared[first + 1 : stop].min())
        if common > depth and (alone or common - depth >= least_shared):
            runs.append(TokenRun(size, common - depth, depth, parent))
            size += common - depth
            depth, parent = common, len(runs) - 1
        if alone:
            last_run[order[first]] = parent
            continue
        cuts = first + 1 + np.flatnonzero(shared[first + 1 : stop] == common)
        edges = [first, *cuts.tolist(), stop]
        children = [(a, b, depth, parent) for a, b in itertools.pairwise(edges)]
        stack.extend(reversed(children))
    return PrefixTree(tuple(runs), tuple(last_run))


def cut_tree(tree: PrefixTree, edges: Sequence[int]) -> PrefixTree:
    """The same tokens, with every run cut at the pack positions `edges` (ascending).

    The second part of a run is a child of the first, so that samples keep their tokens and their
    attention; a run that no edge lies inside stays as it is.
    """
    runs: list[TokenRun] = []
    last_part: list[int] = []
    places = np.unique(np.asarray(edges, dtype=np.int64))
    for run in tree.runs:
        stop = run.start + run.length
        inside = places[(places > run.start) & (places < stop)].tolist()
        parent = last_part[run.parent] if run.parent >= 0 else -1
        for first, last in itertools.pairwise([run.start, *inside, stop]):
            runs.append(TokenRun(first, last - first, run.depth + first - run.start, parent))
            parent = len(runs) - 1
        last_part.append(parent)
    return PrefixTree(tuple(runs), tuple(last_part[run] for run in tree.last_run))


def separate(lengths: Sequence[int]) -> PrefixTree:
    """The tree of samples that share nothing, end to end."""
    starts = itertools.accumulate(lengths, initial=0)
    runs = [TokenRun(start, n, 0, -1) for start, n in zip(starts, lengths, strict=False)]
    return PrefixTree(tuple(runs), tuple(range(len(runs))))


def sort_by_prefix(samples: Sequence[np.ndarray]) -> tuple[list[int], np.ndarray]:
    """Lexicographic order of the samples (`identities`), and how many first tokens each shares with
    the one before it in that order, int64 [samples] (0 for the first). Equal samples keep their
    order.
    """
    keys = [_bytes(sample) for sample in samples]
    order = sorted(range(len(samples)), key=keys.__getitem__)
    shared = np.zeros(len(samples), dtype=np.int64)
    for place in range(1, len(order)):
        shared[place] = _common(samples[order[place - 1]], samples[order[place]])
    return order, shared


def _bytes(sample: np.ndarray) -> bytes:
    if sample.ndim == 2:
        return sample.tobytes()
    # Big-endian bytes of non-negative numbers compare as the numbers do.
    return np.asarray(sample, dtype=">i4").tobytes()


def _common(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    if different.ndim == 2:
        different = different.any(axis=1)
    places = np.flatnonzero(different)
    return int(places[0]) if places.size else length


def identities(tokens: np.ndarray, hashes: np.ndarray | None) -> np.ndarray:
    """What must be equal for a token to be computed once: tokens [L], or bytes [L, 12] where tokens
    have a routing, which decides what is computed, too. hashes: int64 [L], of the routing."""
    if hashes is None:
        return tokens
    every = np.empty((len(tokens), 12), np.uint8)
    every[:, :4] = np.asarray(tokens, dtype=">i4").view(np.uint8).reshape(-1, 4)
    every[:, 4:] = np.ascontiguousarray(hashes, np.int64).view(np.uint8).reshape(-1, 8)
    return every
