"""Drafts for the sequences of a batch: likely next tokens, and how many of them pay.

A draft is verified by one forward pass over all of it. What that costs is measured, for so many
sequences and so many tokens each, and how many tokens of a draft are right is counted, of drafts
that were not used, too. So a batch gets drafts where they are faster than none, and no others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import xxhash

from earl_core.rollout.engines.engine import GenerationRequest
from earl_core.rollout.engines.past_answers import (
    LONGEST_MATCH,
    NOTHING,
    Found,
    PastAnswer,
    PastAnswers,
)

_WIDTHS = (1, 2, 3, 5, 9, 17, 33)
"""Tokens of a sequence in a forward pass: the last one and its draft."""
_KEPT = 5
_SURE = 2
"""Measurements of which the least counts; of more the median does."""
_TRUSTED_PASSES = 2048
"""What was measured before so many passes counts no longer."""
_GROWTH = 0.02
"""What each further token of a sequence adds to a pass, before it is measured."""
_GAIN = 1.04
"""Least gain for which there are drafts."""

_FORGET = 1 / 64
"""Weight of a further draft among those before it."""
_OWN_WEIGHT = 4.0
_MOST_MISSES = 5
"""After so many a sequence is looked at every eighth token."""
_LOOKED_AT = 8
"""So many passes in a row are without drafts before only each such one is looked at."""
_DRAFTED_LOGITS = 1 << 23


def widest_draft(sequences: int, vocabulary: int) -> int:
    """Most tokens of a sequence in a pass in which each has logits, as many as there are tokens."""
    return max(1, _DRAFTED_LOGITS // (sequences * vocabulary))


class PassTimes:
    """What forward passes with drafts take, in passes without any over as many sequences.

    Of a number of sequences and a width that were not measured it is known what they take at least:
    what a token adds grows with the tokens that there are, or stays.
    """

    def __init__(self) -> None:
        self._plain: dict[int, deque[float]] = {}
        self._drafted: dict[tuple[int, int], deque[float]] = {}
        self._noted: dict[tuple[int, int], int] = {}
        self._passes = 0

    def note(self, sequences: int, width: int, seconds: float) -> None:
        """A pass over so many tokens of each sequence has taken so long."""
        rows = _about(sequences)
        self._passes += 1
        self._noted[rows, width] = self._passes
        if width == 1:
            self._plain.setdefault(rows, deque(maxlen=_KEPT)).append(seconds)
        elif rows in self._plain:
            ratio = seconds / _typical(self._plain[rows])
            self._drafted.setdefault((rows, width), deque(maxlen=_KEPT)).append(ratio)

    def known(self, sequences: int) -> bool:
        """Whether passes without drafts were measured, and not too long ago."""
        rows = _about(sequences)
        return len(self._plain.get(rows, ())) >= _SURE and self._is_new((rows, 1))

    def expected(self, sequences: int, width: int) -> float:
        """What such a pass takes, or takes at least."""
        rows = _about(sequences)
        if (rows, width) in self._drafted and self._is_new((rows, width)):
            return _typical(self._drafted[rows, width])
        added = _GROWTH
        for (other, narrower), ratios in self._drafted.items():
            if narrower <= width and self._is_new((other, narrower)):
                each = (_typical(ratios) - 1) / (narrower - 1)
                added = max(added, each * min(1.0, rows / other))
        return 1 + added * (width - 1)

    def _is_new(self, key: tuple[int, int]) -> bool:
        return self._passes - self._noted[key] < _TRUSTED_PASSES


def _typical(measured: Collection[float]) -> float:
    return min(measured) if len(measured) <= _SURE else median(measured)


def _about(sequences: int) -> int:
    """Numbers that take about as long: up to 8 as they are, then in steps of a quarter at most."""
    step = 1 << max(0, sequences.bit_length() - 3)
    return -(-sequences // step) * step


class Accepted:
    """Share of draft tokens that were right, the later ones counting more."""

    def __init__(self, share: float, weight: float) -> None:
        self._right, self._all = share * weight, weight

    def note(self, right: int, wrong: int) -> None:
        """So many more were right, and wrong."""
        keep = (1 - _FORGET) ** (right + wrong)
        self._right = self._right * keep + right
        self._all = self._all * keep + right + wrong

    def share(self, other: float = 0.0, weight: float = 0.0) -> float:
        """The share; together with another one of this weight."""
        return (self._right + other * weight) / (self._all + weight)


@dataclass
class _Sequence:
    """A sequence that drafts are made for. guess: of what comes next. match: the tokens before that
    which are equal in the answer it is from. rest: tokens until the next one is looked for."""

    prompt: int
    turns: int = 0
    answer: PastAnswer | None = None
    guess: list[int] = field(default_factory=list)
    match: int = 0
    rest: int = 0
    misses: int = 0
    accepted: Accepted = field(default_factory=lambda: Accepted(0.0, 0.0))

    def miss(self) -> None:
        """Nothing was found, or nothing of it was right."""
        self.misses = min(self.misses + 1, _MOST_MISSES)
        self.rest = 1 << self.misses >> 2


class Drafting:
    """Drafts of one engine, from all that it has answered. most_tokens: of a draft. memory: bytes
    of the answers."""

    def __init__(self, most_tokens: int, memory: int) -> None:
        self.most_tokens = most_tokens
        self._past = PastAnswers(memory)
        self._sequences: dict[int, _Sequence] = {}
        self._times = PassTimes()
        self._undrafted = 0
        # By the bits of the match, optimistic: what is not tried is not learnt.
        classes = LONGEST_MATCH.bit_length() + 1
        self._accepted = [Accepted(0.7, 4.0) for _ in range(classes)]

    def begin(self, request: GenerationRequest) -> None:
        """An answer begins, or goes on where it was left."""
        sequence = self._sequences.get(request.sequence_id)
        if sequence is None:
            prompt = np.array(request.tokens, dtype=np.int64).tobytes()
            sequence = _Sequence(xxhash.xxh3_64_intdigest(prompt))
            self._sequences[request.sequence_id] = sequence
        sampled, answer = request.sampled, sequence.answer
        if sampled and answer is not None and answer.tokens[2:].tolist() == sampled:
            return
        self._end(sequence)
        sequence.answer = self._past.begin(sequence.prompt, sequence.turns)
        self._add(sequence, sampled)
        sequence.guess, sequence.rest, sequence.misses = [], 0, 0
        sequence.turns += 1

    def propose(
        self, sequence_ids: Sequence[int | None], room: Sequence[int], widest: int
    ) -> list[list[int]]:
        """A draft for each sequence of a pass, empty for None. room: most tokens of each draft.
        widest: most tokens of a sequence in the pass."""
        self._undrafted += 1
        if self._undrafted > _LOOKED_AT and self._undrafted % _LOOKED_AT:
            return [[] for _ in room]
        guesses = [
            self._guess(self._sequences[each], most) if each is not None and most > 0 else (0.0, [])
            for each, most in zip(sequence_ids, room, strict=True)
        ]
        width = self._width([(share, len(guess)) for share, guess in guesses], widest)
        if width > 1:
            self._undrafted = 0
        return [guess[: width - 1] for _, guess in guesses]

    def took(self, sequence_id: int, tokens: Sequence[int]) -> None:
        """The sequence went on with these tokens, drawn after a draft or after none."""
        sequence = self._sequences[sequence_id]
        self._add(sequence, tokens)
        guess, count = sequence.guess, len(tokens)
        sequence.rest = max(0, sequence.rest - count)
        if not guess:
            return
        pairs = zip(guess, tokens, strict=False)
        right = next((n for n, (one, other) in enumerate(pairs) if one != other), None)
        wrong = right is not None
        right = min(len(guess), count) if right is None else right
        self._accepted[sequence.match.bit_length()].note(right, int(wrong))
        sequence.accepted.note(right, int(wrong))
        sequence.match = min(LONGEST_MATCH, sequence.match + right)
        sequence.guess = [] if wrong else guess[count:]
        if right:
            sequence.misses = 0
        else:
            sequence.miss()

    def timed(self, sequences: int, width: int, seconds: float) -> None:
        """A pass over so many tokens of each sequence has taken so long, all that belongs to it
        included."""
        self._times.note(sequences, width, seconds)

    def finish(self, sequence_id: int) -> None:
        """The sequence does not go on; its answers are remembered."""
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is not None:
            self._end(sequence)

    def _add(self, sequence: _Sequence, tokens: Sequence[int]) -> None:
        if sequence.answer is not None:
            self._past.add(sequence.answer, tokens)
            if not sequence.answer.open:
                # There was no room. What is evicted next must be held by nobody.
                sequence.answer = None

    def _end(self, sequence: _Sequence) -> None:
        if sequence.answer is not None:
            self._past.end(sequence.answer)
            sequence.answer = None

    def _guess(self, sequence: _Sequence, most: int) -> tuple[float, list[int]]:
        """The share of its tokens that is expected to be right, and the guess."""
        if 2 * len(sequence.guess) < self.most_tokens and not sequence.rest:
            found = self._continued(sequence)
            if found.tokens:
                sequence.guess, sequence.match = found.tokens, found.match
            elif not sequence.guess:
                sequence.miss()
        all_of_them = self._accepted[sequence.match.bit_length()].share()
        share = sequence.accepted.share(all_of_them, _OWN_WEIGHT)
        return share, sequence.guess[:most]

    def _continued(self, sequence: _Sequence) -> Found:
        answer = sequence.answer
        if answer is None:
            return NOTHING
        return self._past.continued(answer, self.most_tokens)

    def _width(self, guesses: Sequence[tuple[float, int]], widest: int) -> int:
        """Tokens of each sequence for which a pass gets on fastest."""
        count, longest = len(guesses), 1 + max((length for _, length in guesses), default=0)
        if longest == 1 or not self._times.known(count):
            return 1
        best, width = _GAIN * count, 1
        for each in _WIDTHS[1:]:
            if each > widest:
                break
            gained = sum(_expected(share, min(length, each - 1)) for share, length in guesses)
            rate = (count + gained) / self._times.expected(count, each)
            if rate > best:
                best, width = rate, each
            if each >= longest:
                break
        return width


def _expected(share: float, length: int) -> float:
    """Tokens of a draft that are right up to the first wrong one."""
    if share >= 1.0:
        return float(length)
    return share * (1 - share**length) / (1 - share)
