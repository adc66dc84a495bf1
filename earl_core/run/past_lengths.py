"""Lengths to expect of prompts, from the episodes that the run has kept.

A prompt is known by the hash of the tokens that its episodes begin with. Environments number their
prompts, and most begin anew after as many as they have: that number is found in the kept episodes,
so that lengths are known before anything of a rollout is played.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance

import numpy as np
import pyarrow as pa
import xxhash

from earl_core.run.episodes import NAME, read_samples
from earl_core.trajectory.samples import SAMPLE_BITS

MOST_ITERATIONS = 256
"""Iterations that are looked back on."""
MOST_BYTES = 512 * 2**20
"""Of their files together, of which tokens and loss masks are read, once."""
_ENOUGH = 4
"""Prompts that must have come again, before it is believed that they do."""
_COLUMNS = ("sample_id", "prompt_id", "environment", "tokens", "loss_mask")

Prompt = tuple[str, int]
"""The label of an environment, empty where the run has but one, and the index of a prompt there."""


@dataclass(frozen=True)
class PastLength:
    """Tokens that an episode of a prompt sampled. error: variance of the mean by chance, 0 for one
    episode alone."""

    mean: float
    error: float

    @classmethod
    def of(cls, lengths: Sequence[float]) -> PastLength:
        """Of the episodes of a prompt."""
        count = len(lengths)
        return cls(fmean(lengths), variance(lengths) / count if count > 1 else 0.0)


@dataclass(frozen=True)
class PastPrompt:
    """Lengths of the episodes of a prompt. begins: hash of their first tokens."""

    begins: int
    lengths: tuple[float, ...]


class PastLengths:
    """Reads the kept episodes of a run, each file once.

    path: the run's directory. kept_bytes: of the kept episodes, `tracking.keep_episodes_bytes`. No
    more than half of them is looked back on: the older ones may be removed before a resume.
    """

    def __init__(self, path: Path, kept_bytes: int) -> None:
        self._path, self._most_bytes = path, min(MOST_BYTES, kept_bytes // 2)
        self._read: dict[int, tuple[tuple[int, int], dict[Prompt, PastPrompt]]] = {}

    def expected(self, prompts: Sequence[Prompt], last: int) -> list[PastLength | None]:
        """Sampled tokens of an episode of each prompt, from iterations up to `last`; None where
        they do not say. Raises `EpisodesDamaged`, `OSError`."""
        known: dict[str, dict[int, int]] = {}
        found: dict[int | None, PastLength] = {}
        # Where a text was played several times, the newest iteration counts.
        for played in self._window(last):
            lengths: dict[int, list[float]] = {}
            for (label, number), each in played.items():
                known.setdefault(label, {})[number] = each.begins
                lengths.setdefault(each.begins, []).extend(each.lengths)
            found |= {begins: PastLength.of(each) for begins, each in lengths.items()}
        texts = {label: Repeating(numbers) for label, numbers in known.items()}
        return [
            found.get(texts[label].at(number)) if label in texts else None
            for label, number in prompts
        ]

    def _window(self, last: int) -> list[dict[Prompt, PastPrompt]]:
        """What the files of the last iterations say, as far back as the bounds allow; the oldest
        first."""
        found, left = [], self._most_bytes
        for iteration in range(last, max(-1, last - MOST_ITERATIONS), -1):
            path = self._path / "iterations" / f"{iteration:06d}" / NAME
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            left -= status.st_size
            if left < 0:
                break
            state = status.st_mtime_ns, status.st_size
            if iteration not in self._read or self._read[iteration][0] != state:
                self._read[iteration] = state, read_prompts(path)
            found.append(self._read[iteration][1])
        return found[::-1]


class Repeating:
    """Texts of prompts that may come again after a fixed number of them. begins: hashes by the
    prompt's index."""

    def __init__(self, begins: Mapping[int, int]) -> None:
        numbers = np.array(sorted(begins), dtype=np.int64)
        self._first = int(numbers[0])
        places = numbers - self._first
        self._hashes = np.zeros(int(places[-1]) + 1, dtype=np.uint64)
        self._hashes[places] = [begins[number] for number in numbers.tolist()]
        self._there = np.zeros(len(self._hashes), dtype=bool)
        self._there[places] = True
        self.period = next(filter(self._repeats_after, self._candidates()), None)

    def at(self, number: int) -> int | None:
        """The hash of this prompt's first tokens; None where it is not known."""
        place = number - self._first
        if self.period is not None and place >= 0:
            same = range(place % self.period, len(self._hashes), self.period)
            return next((int(self._hashes[at]) for at in same if self._there[at]), None)
        known = 0 <= place < len(self._hashes) and self._there[place]
        return int(self._hashes[place]) if known else None

    def _candidates(self) -> Iterable[int]:
        """Distances at which the last text stands already, ascending; none where most prompts are
        not known, because a curriculum chose among rows."""
        if 2 * self._there.sum() < len(self._there):
            return []
        last = len(self._hashes) - 1
        same = np.flatnonzero(self._there[:last] & (self._hashes[:last] == self._hashes[last]))
        return (last - same)[::-1].tolist()

    def _repeats_after(self, period: int) -> bool:
        both = self._there[period:] & self._there[:-period]
        equal = self._hashes[period:] == self._hashes[:-period]
        return int(both.sum()) >= min(period, _ENOUGH) and bool(equal[both].all())


def read_prompts(path: Path) -> dict[Prompt, PastPrompt]:
    """What a file of kept episodes says of prompts. Raises `EpisodesDamaged`, `OSError`."""
    table = read_samples(path, columns=_COLUMNS)
    labels, prompts = table["environment"].to_pylist(), table["prompt_id"].to_pylist()
    samples = table["sample_id"].to_numpy()
    tokens, masks = _lists(table, "tokens"), _lists(table, "loss_mask")
    begins: dict[Prompt, int] = {}
    sampled: dict[Prompt, Counter[int]] = {}
    for row, prompt in enumerate(zip(labels, prompts, strict=True)):
        mask = masks[row]
        if prompt not in begins:
            first = int(mask.argmax()) if mask.any() else len(mask)
            begins[prompt] = xxhash.xxh3_64_intdigest(tokens[row][:first].tobytes())
        episode = int(samples[row]) >> SAMPLE_BITS
        sampled.setdefault(prompt, Counter())[episode] += int(mask.sum())
    return {
        prompt: PastPrompt(each, tuple(map(float, sampled[prompt].values())))
        for prompt, each in begins.items()
    }


def _lists(table: pa.Table, name: str) -> list[np.ndarray]:
    """The rows of a list column, as views."""
    found: list[np.ndarray] = []
    for chunk in table[name].chunks:
        values = chunk.values.to_numpy()
        edges = chunk.offsets.to_numpy()
        found += [values[a:b] for a, b in itertools.pairwise(edges.tolist())]
    return found
