"""A run's kept episodes, packed for its page: an index of all, and parts that are opened on demand.

A part is a pair of compressed JSON texts. The first has what was said: `texts` (of each episode:
observation, answer, ..., and what the environment said at the end), `rewards` of its turns, and
`scores` of reward functions. The second has `vocabulary`, pairs of a token's number and text, and
of each episode its samples: `i` indices into the vocabulary, `o` pairs of a place and the text
there where a character has several tokens, `s` starts of turns, `m` runs of the loss mask as pairs
of start and length, `l` log-probs of the tokens in these runs, in hundredths of a nat; null for an
episode whose tokens hold a secret.
"""

from __future__ import annotations

import base64
import gzip
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from earl_core.run.episodes import EpisodesDamaged, read_samples
from earl_core.secrets import redact
from tasks.reports.run_page.token_texts import TokenTexts

logger = logging.getLogger(__name__)

_SCALARS = [
    "episode_id", "prompt_id", "group_id", "environment", "finish_reason", "outcome", "reward",
    "turns", "scores",
]  # fmt: skip
_LISTS = ["texts", "turn_rewards", "tokens", "loss_mask", "rollout_logprobs", "turn_starts"]
_PER_PART = 256
_FOR_TEXTS = 0.6
"""Of a part's bytes; what they leave is for tokens."""
_PLAUSIBLE = 6
"""No JSON here shrinks to less than this part of its tokens or characters."""


class PackedEpisodes(NamedTuple):
    """index: columns of equal length, one entry an episode. parts: the two texts of each."""

    index: dict[str, list[Any]]
    parts: list[tuple[str, str]]
    damaged: list[str]

    @property
    def encoded_index(self) -> str:
        """The index as the page has it."""
        return encoded(self.index)


def encoded(value: Any) -> str:
    """Plain data as compressed JSON in base64."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def pack_episodes(
    files: Sequence[tuple[int, Path]], tokens: TokenTexts | None, most: int, most_bytes: int
) -> PackedEpisodes:
    """The first episodes of each iteration, as many as make `most` together.

    files: with their iterations. most_bytes: of all parts; every part has its share, and what does
    not fit is in the index alone: of the texts first come the first episodes, then their tokens.
    """
    packed = PackedEpisodes({}, [], [])
    left = float(most_bytes)
    quotas = _quotas(most, len(files))
    for number, ((iteration, file), quota) in enumerate(zip(files, quotas, strict=True)):
        try:
            table = read_samples(file, quota, [*_SCALARS, *_LISTS])
        except FileNotFoundError:
            continue  # A live run removes its oldest.
        except EpisodesDamaged as error:
            packed.damaged.append(str(error))
            continue
        episodes = _Episodes(table, iteration)
        pieces = [
            range(start, min(start + _PER_PART, len(episodes)))
            for start in range(0, len(episodes), _PER_PART)
        ]
        share = left / (len(files) - number)
        for place, piece in enumerate(pieces):
            used = _add_part(packed, episodes, piece, tokens, share / (len(pieces) - place))
            share, left = share - used, left - used
    return packed


def _quotas(most: int, files: int) -> list[int]:
    whole, rest = divmod(most, max(files, 1))
    return [whole + (number < rest) for number in range(files)]


def _add_part(
    packed: PackedEpisodes,
    episodes: _Episodes,
    piece: range,
    tokens: TokenTexts | None,
    most_bytes: float,
) -> float:
    """Add a piece of an iteration's episodes; the bytes that it takes."""
    texts, with_text = _fitting(
        piece, episodes.characters, _FOR_TEXTS * most_bytes, lambda some: _said(episodes, some)
    )
    sampled, with_tokens = "", 0
    if tokens is not None:
        sampled, with_tokens = _fitting(
            piece[:with_text],
            episodes.tokens,
            most_bytes - len(texts),
            lambda some: _sampled(episodes, some, tokens),
        )
    for place, number in enumerate(piece):
        row = episodes.summary(number)
        shown = (place < with_text) + (place < with_tokens)
        row |= {"part": len(packed.parts), "place": place, "shown": shown}
        for name, value in row.items():
            packed.index.setdefault(name, []).append(value)
    packed.parts.append((texts, sampled))
    return len(texts) + len(sampled)


def _fitting(
    piece: range, sizes: np.ndarray, most_bytes: float, make: Callable[[range], Any]
) -> tuple[str, int]:
    """The first episodes that fit into these bytes, encoded, and how many they are."""
    ends = np.cumsum(sizes[piece.start : piece.stop])
    count = int(np.searchsorted(ends, _PLAUSIBLE * most_bytes, side="right"))
    while count > 0:
        text = encoded(make(piece[:count]))
        if len(text) <= most_bytes:
            return text, count
        count = min(count - 1, int(0.95 * count * most_bytes / len(text)))
    return "", 0


class _Episodes:
    """A table of samples, episode by episode."""

    def __init__(self, table: pa.Table, iteration: int) -> None:
        self.iteration = iteration
        ids = table["episode_id"].to_numpy()
        starts = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1))
        self.rows = list(zip(starts, [*starts[1:], len(ids)], strict=True))
        self.scalars = {name: table[name].to_pylist() for name in _SCALARS}
        self.lists = {name: _column(table, name) for name in _LISTS}
        lengths = np.diff(self.lists["tokens"][1])
        self.tokens = np.array([lengths[one:end].sum() for one, end in self.rows])
        self.longest = [int(lengths[one:end].max()) for one, end in self.rows]
        self.texts = [self._texts(one, end) for one, end in self.rows]
        self.characters = np.array([sum(map(len, texts)) for texts in self.texts])

    def __len__(self) -> int:
        return len(self.rows)

    def values(self, name: str, row: int) -> np.ndarray:
        """A list of a sample."""
        values, offsets = self.lists[name]
        return values[offsets[row] : offsets[row + 1]]

    def _texts(self, one: int, end: int) -> list[str]:
        return [text for row in range(one, end) for text in self.values("texts", row)]

    def rewards(self, number: int) -> list[float]:
        """Of the turns of an episode."""
        one, end = self.rows[number]
        return [_short(r) for row in range(one, end) for r in self.values("turn_rewards", row)]

    def summary(self, number: int) -> dict[str, Any]:
        """What the list of episodes shows and filters by."""
        one, end = self.rows[number]
        first = {name: column[one] for name, column in self.scalars.items()}
        named = ("environment", "finish_reason", "outcome")
        return {
            "iteration": self.iteration,
            "episode": first["episode_id"],
            "prompt": first["prompt_id"],
            "group": first["group_id"],
            **{name.partition("_")[0]: redact(first[name]) for name in named},
            "reward": None if first["reward"] is None else _short(first["reward"]),
            "turns": sum(self.scalars["turns"][one:end]),
            "tokens": self.longest[number],
            "samples": int(end - one),
        }


def _column(table: pa.Table, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The values of all lists, one after the other, and where each begins and ends."""
    column = table[name].combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks or [pa.array([], column.type)])
    return column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy()


def _said(episodes: _Episodes, piece: range) -> dict[str, Any]:
    texts = [episodes.texts[number] for number in piece]
    scores = [episodes.scalars["scores"][episodes.rows[number][0]] or "" for number in piece]
    if _holds_secret("\n".join(text for each in (*texts, scores) for text in each)):
        # Learnt since the run kept them.
        texts = [[redact(text) for text in each] for each in texts]
        scores = [redact(text) for text in scores]
    rewards = [episodes.rewards(number) for number in piece]
    return {"texts": texts, "rewards": rewards, "scores": scores}


def _sampled(episodes: _Episodes, piece: range, tokens: TokenTexts) -> dict[str, Any]:
    places: dict[int, int] = {}
    texts: list[str] = []
    whole: list[str] = []
    samples = []
    for number in piece:
        rows, pieces = range(*episodes.rows[number]), []
        for row in rows:
            ids = episodes.values("tokens", row).tolist()
            pieces.append((ids, tokens.pieces(ids)))
        whole.append("".join(text for _, said in pieces for text in said))
        for token, text in ((t, p) for ids, said in pieces for t, p in zip(ids, said, strict=True)):
            if token not in places:
                places[token] = len(texts)
                texts.append(text)
        samples.append(
            [
                _sample(episodes, row, [places[token] for token in ids], said, texts)
                for row, (ids, said) in zip(rows, pieces, strict=True)
            ]
        )
    if _holds_secret("\n".join(whole)):
        # Tokens pass no redactor when they are kept.
        hidden = [_holds_secret(text) for text in whole]
        samples = [None if bad else each for bad, each in zip(hidden, samples, strict=True)]  # type: ignore[misc]
        texts = _without_hidden(texts, samples)
    return {"vocabulary": list(zip(places, texts, strict=True)), "samples": samples}


def _without_hidden(texts: list[str], samples: Sequence[Any]) -> list[str]:
    """The vocabulary without tokens that hidden episodes alone have."""
    kept = (sample for each in samples if each is not None for sample in each)
    used = {place for sample in kept for place in sample["i"]}
    return [text if place in used else "" for place, text in enumerate(texts)]


def _sample(
    episodes: _Episodes, row: int, places: list[int], said: list[str], texts: list[str]
) -> dict[str, Any]:
    mask = episodes.values("loss_mask", row)
    logprobs = episodes.values("rollout_logprobs", row)[mask == 1]
    edges = np.flatnonzero(np.diff(mask, prepend=0, append=0)).tolist()
    return {
        "i": places,
        "o": [[at, text] for at, text in enumerate(said) if text != texts[places[at]]],
        "s": episodes.values("turn_starts", row).tolist(),
        "m": [[one, end - one] for one, end in zip(edges[::2], edges[1::2], strict=True)],
        "l": np.rint(100 * logprobs.astype(float)).astype(int).tolist(),
    }


def _holds_secret(text: str) -> bool:
    return redact(text) != text


def _short(value: float) -> float:
    return float(f"{value:.6g}")
