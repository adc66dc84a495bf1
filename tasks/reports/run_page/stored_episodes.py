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

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from earl_core.run.episodes import EpisodesDamaged
from earl_core.run.kept_episodes import KeptEpisodes, kept_episodes
from earl_core.secrets import redact
from earl_core.secrets.redactor import HIDDEN
from earl_core.secrets.rules import Redaction
from tasks.reports.web_page import encoded

logger = logging.getLogger(__name__)

_FIELDS = (
    "episode_id", "prompt_id", "group_id", "environment", "finish_reason", "outcome", "reward",
    "scores",
)  # fmt: skip
_NAMED = ("environment", "finish_reason", "outcome")
_LISTS = ("tokens", "loss_mask", "rollout_logprobs", "turn_starts")
_PER_PART = 256
_FOR_TEXTS = 0.6
"""Share of a part's bytes for texts; the rest is for tokens."""
UNFINISHED = "\ufffd"
"""Character in the piece of a token that is a part of a character."""
_LONGEST = 8
"""Tokens that one character of text may take, with room to spare."""


@dataclass(frozen=True)
class PackedEpisodes:
    """index: columns of equal length, one entry an episode. parts: the two texts of each. damaged:
    what is wrong with files that could not be read."""

    index: dict[str, list[Any]] = field(default_factory=dict)
    parts: list[tuple[str, str]] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


def pack_episodes(
    files: Sequence[Path],
    tokens: TokenTexts | None,
    most: int,
    most_bytes: int,
    redaction: Redaction,
) -> PackedEpisodes:
    """The first episodes of each iteration, as many as make `most` together.

    tokens: None: they are not shown; under rules of redaction they are the text again. most_bytes:
    of all parts; every part has its share, and what does not fit is in the index alone: of the
    texts first come the first episodes, then their tokens.
    """
    packed, encoders = PackedEpisodes(), (_Encoder(), _Encoder())
    left = float(most_bytes)
    quotas = _quotas(most, len(files))
    for number, (file, quota) in enumerate(zip(files, quotas, strict=True)):
        try:
            kept = kept_episodes(file, redaction, _FIELDS, (*_LISTS, "turns"), quota)
        except FileNotFoundError:
            continue  # A live run removes its oldest.
        except EpisodesDamaged as error:
            packed.damaged.append(str(error))
            continue
        episodes = _Episodes(kept)
        pieces = [
            range(start, min(start + _PER_PART, len(episodes)))
            for start in range(0, len(episodes), _PER_PART)
        ]
        share = left / (len(files) - number)
        for place, piece in enumerate(pieces):
            room = share / (len(pieces) - place)
            used = _add_part(packed, episodes, piece, tokens, encoders, room)
            share, left = share - used, left - used
    return packed


def _quotas(most: int, files: int) -> list[int]:
    whole, rest = divmod(most, max(files, 1))
    return [whole + (number < rest) for number in range(files)]


class _Encoder:
    """Encodes as many episodes as fit. rate: bytes that a token or character took last."""

    def __init__(self) -> None:
        # No JSON here shrinks to less.
        self.rate = 1 / 6

    def fitting(
        self, piece: range, sizes: np.ndarray, most_bytes: float, make: Callable[[range], Any]
    ) -> tuple[str, int]:
        """The first episodes that fit into these bytes, encoded, and how many they are."""
        ends = np.cumsum(sizes[piece.start : piece.stop])
        count = int(np.searchsorted(ends, most_bytes / self.rate, side="right"))
        while count > 0:
            text = encoded(make(piece[:count]))
            self.rate = max(len(text), 1) / max(int(ends[count - 1]), 1)
            if len(text) <= most_bytes:
                return text, count
            fits = np.searchsorted(ends, 0.97 * most_bytes / self.rate, side="right")
            count = min(count - 1, int(fits))
        return "", 0


def _add_part(
    packed: PackedEpisodes,
    episodes: _Episodes,
    piece: range,
    tokens: TokenTexts | None,
    encoders: tuple[_Encoder, _Encoder],
    most_bytes: float,
) -> float:
    """Add a piece of an iteration's episodes; the bytes that it takes."""
    said, sampled = encoders
    texts, with_text = said.fitting(
        piece, episodes.characters, _FOR_TEXTS * most_bytes, lambda some: _said(episodes, some)
    )
    ids, with_tokens = "", 0
    if tokens is not None:
        ids, with_tokens = sampled.fitting(
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
    packed.parts.append((texts, ids))
    return len(texts) + len(ids)


class _Episodes:
    """The episodes of a file, and their samples as arrays."""

    def __init__(self, kept: KeptEpisodes) -> None:
        self.kept = kept.episodes
        self.lists = {name: _column(kept.samples, name) for name in _LISTS}
        self._turns = kept.samples["turns"].to_numpy()
        lengths = np.diff(self.lists["tokens"][1])
        own = [lengths[each["rows"].start : each["rows"].stop] for each in self.kept]
        self.tokens = np.array([each.sum() for each in own])
        self.longest = [int(each.max()) for each in own]
        self.characters = np.array([sum(map(len, each["texts"])) for each in self.kept])

    def __len__(self) -> int:
        return len(self.kept)

    def values(self, name: str, row: int) -> np.ndarray:
        """A list of a sample."""
        values, offsets = self.lists[name]
        return values[offsets[row] : offsets[row + 1]]

    def summary(self, number: int) -> dict[str, Any]:
        """Return the values that the list of episodes shows and filters by."""
        episode = self.kept[number]
        rows = episode["rows"]
        return {
            "iteration": episode["iteration"],
            "episode": episode["episode_id"],
            "prompt": episode["prompt_id"],
            "group": episode["group_id"],
            **{name.partition("_")[0]: episode[name] for name in _NAMED},
            "reward": _short(episode["reward"]),
            "turns": int(self._turns[rows.start : rows.stop].sum()),
            "tokens": self.longest[number],
            "samples": len(rows),
        }


def _column(table: pa.Table, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The values of all lists, one after the other, and where each begins and ends."""
    column = table[name].combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks or [pa.array([], column.type)])
    return column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy()


def _said(episodes: _Episodes, piece: range) -> dict[str, Any]:
    kept = [episodes.kept[number] for number in piece]
    return {
        "texts": [each["texts"] for each in kept],
        "rewards": [list(map(_short, each["turn_rewards"])) for each in kept],
        "scores": [json.dumps(each["scores"]) if each["scores"] else "" for each in kept],
    }


def _sampled(episodes: _Episodes, piece: range, tokens: TokenTexts) -> dict[str, Any]:
    rows = range(episodes.kept[piece[0]]["rows"].start, episodes.kept[piece[-1]]["rows"].stop)
    ids = [episodes.values("tokens", row) for row in rows]
    vocabulary, places = np.unique(np.concatenate(ids), return_inverse=True)
    texts = tokens.pieces(vocabulary.tolist())
    unfinished = np.array([UNFINISHED in text for text in texts])[places]
    samples: list[Any] = []
    whole, at = [], 0
    for number in piece:
        own, said = [], []
        for row in episodes.kept[number]["rows"]:
            part = slice(at, at + len(ids[row - rows.start]))
            partial = np.flatnonzero(unfinished[part]).tolist()
            other = tokens.joined(ids[row - rows.start].tolist(), partial) if partial else {}
            own.append(_sample(episodes, row, places[part].tolist(), other))
            pieces = [texts[place] for place in own[-1]["i"]]
            for place, text in other.items():
                pieces[place] = text
            said += pieces
            at = part.stop
        samples.append(own)
        whole.append("".join(said))
    hidden = [_was_redacted(episodes.kept[number]["texts"]) for number in piece]
    if _holds_secret("\n".join(whole)):
        hidden = [bad or _holds_secret(text) for bad, text in zip(hidden, whole, strict=True)]
    if any(hidden):
        samples = [None if bad else each for bad, each in zip(hidden, samples, strict=True)]
        texts = _without_hidden(texts, samples)
    return {"vocabulary": list(zip(vocabulary.tolist(), texts, strict=True)), "samples": samples}


def _without_hidden(texts: list[str], samples: Sequence[Any]) -> list[str]:
    """The vocabulary without tokens that hidden episodes alone have."""
    kept = (sample for each in samples if each is not None for sample in each)
    used = {place for sample in kept for place in sample["i"]}
    return [text if place in used else "" for place, text in enumerate(texts)]


def _sample(
    episodes: _Episodes, row: int, places: list[int], other: dict[int, str]
) -> dict[str, Any]:
    mask = episodes.values("loss_mask", row)
    logprobs = episodes.values("rollout_logprobs", row)[mask == 1]
    edges = np.flatnonzero(np.diff(mask, prepend=0, append=0)).tolist()
    return {
        "i": places,
        "o": list(other.items()),
        "s": episodes.values("turn_starts", row).tolist(),
        "m": [[one, end - one] for one, end in zip(edges[::2], edges[1::2], strict=True)],
        "l": np.rint(100 * logprobs.astype(float)).astype(int).tolist(),
    }


def _holds_secret(text: str) -> bool:
    return redact(text) != text


def _was_redacted(texts: Sequence[str]) -> bool:
    """Tell whether the run hid something in these texts, perhaps a secret that nobody here knows:
    no redactor has seen the tokens."""
    return any(HIDDEN in text for text in texts)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def find_token_texts(files: Iterable[Path]) -> TokenTexts | None:
    """Return the texts of the first file that is a tokenizer's; None where none is."""
    for file in files:
        try:
            return TokenTexts(Tokenizer.from_file(str(file)))
        except Exception:  # The library raises nothing more exact.
            continue
    return None


class TokenTexts:
    """Pieces of text that together read as the tokenizer decodes the whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        # Some decoders drop the space in front of a text's first token.
        self._anchor = 0
        self._before = self._decode([[0]])[0]

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """One text for each token, whatever stands beside it."""
        new = [token for token in set(tokens) if token not in self._known]
        after = self._decode([[self._anchor, token] for token in new])
        alone = self._decode([[token] for token in new])
        for token, longer, short in zip(new, after, alone, strict=True):
            begins = longer.startswith(self._before)
            self._known[token] = longer[len(self._before) :] if begins else short
        return [self._known[token] for token in tokens]

    def joined(self, tokens: Sequence[int], unfinished: Iterable[int]) -> dict[int, str]:
        """Return the texts at places whose piece is only a part of a character: the whole character
        at the first of its tokens, nothing at the others. unfinished: these places, ascending."""
        found: dict[int, str] = {}
        for at in unfinished:
            if at in found:
                continue
            for end in range(at + 2, min(len(tokens), at + _LONGEST) + 1):
                text = self._decode([list(tokens[at:end])])[0]
                if UNFINISHED not in text:
                    found |= {at: text, **dict.fromkeys(range(at + 1, end), "")}
                    break
        return found

    def _decode(self, tokens: list[list[int]]) -> list[str]:
        decoded: Any = self._tokenizer.decode_batch(tokens, skip_special_tokens=False)
        return list(decoded)
