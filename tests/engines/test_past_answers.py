"""The index of past answers against a search of all of them, and its bound of bytes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from earl_core.rollout.engines.past_answers import (
    LONGEST_MATCH,
    NEWEST,
    NOTHING,
    Found,
    PastAnswer,
    PastAnswers,
)

Piece = tuple[int, list[int]]
"""Tokens of one of the answers that grow at the same time."""
PIECES = st.lists(
    st.tuples(st.integers(0, 4), st.lists(st.integers(0, 2), max_size=12)), max_size=24
)


def _written(past: PastAnswers, pieces: Sequence[Piece]) -> tuple[list[PastAnswer], list[Place]]:
    """Five answers to two prompts that grow piece by piece; and each token's place as it came."""
    answers = [past.begin(number % 2, turn=number // 4) for number in range(5)]
    places = []
    for number, tokens in pieces:
        for token in tokens:
            places.append((answers[number], len(answers[number].tokens)))
            past.add(answers[number], [token])
    return answers, places


Place = tuple[PastAnswer, int]


def _searched(answer: PastAnswer, places: Sequence[Place], most: int) -> Found:
    """What `PastAnswers.continued` promises, by comparing with all that there is."""
    end = answer.tokens.tolist()
    matches = []
    for other, at in reversed(places):
        before = other.tokens[:at].tolist()
        alike = 0
        while alike < min(len(end), at, LONGEST_MATCH) and before[-1 - alike] == end[-1 - alike]:
            alike += 1
        if other.prompt == answer.prompt and alike >= 2:
            matches.append((alike, other, at))
    matches = matches[:NEWEST]
    if not matches:
        return NOTHING
    longest = max(alike for alike, _, _ in matches)
    best = [(other, at) for alike, other, at in matches if alike == longest]
    counts = Counter(other.tokens[at] for other, at in best)
    source, at = next((o, at) for o, at in best if counts[o.tokens[at]] == max(counts.values()))
    text = source.tokens.tolist()
    while source is answer and len(text) < at + most:
        text.append(text[len(text) - len(source.tokens) + at])
    return Found(text[at : at + most], longest)


@settings(max_examples=200, deadline=None)
@given(PIECES, st.integers(1, 20))
def test_what_followed_is_found_as_by_a_search_of_everything(
    pieces: list[Piece], most: int
) -> None:
    past = PastAnswers(2**20)
    answers, places = _written(past, pieces)
    for answer in answers:
        assert past.continued(answer, most) == _searched(answer, places, most)


@settings(max_examples=60, deadline=None)
@given(PIECES, st.integers(2**11, 2**13), st.integers(1, 4))
def test_the_bytes_are_bounded_and_others_make_room(
    pieces: list[Piece], memory: int, often: int
) -> None:
    past = PastAnswers(memory)
    for _ in range(often):
        answers, _ = _written(past, [(number, 9 * tokens) for number, tokens in pieces])
        assert _bytes(past) <= past.nbytes <= memory
        kept = {each.number for each in answers if each.open}
        for answer in answers:
            # What was forgotten is not found, and nothing breaks.
            past.continued(answer, 8)
            past.end(answer)
        assert kept <= set(past._answers)
    # Alone they leave in the order in which they came.
    last = []
    for _ in range(20):
        last.append(answer := past.begin(2, 0))
        past.add(answer, range(5))
        past.end(answer)
    held = [each.number for each in last if each.number in past._answers]
    assert held == list(range(last[-1].number + 1 - len(held), last[-1].number + 1))
    assert _bytes(past) <= past.nbytes <= memory


def _bytes(past: PastAnswers) -> int:
    held = past._answers.values()
    arrays = sum(sys.getsizeof(each.tokens) + sys.getsizeof(each.before) for each in held)
    return sys.getsizeof(past._last) + arrays + sum(map(sys.getsizeof, held))


def test_an_answer_that_finds_no_room_is_forgotten_and_others_go_on() -> None:
    past = PastAnswers(2**12)
    first, second = past.begin(0, 0), past.begin(0, 0)
    past.add(first, range(1000))
    assert not first.open
    past.add(second, range(20))
    assert second.open
    past.end(second)
    third = past.begin(0, 0)
    assert past.continued(third, 4) == Found([0, 1, 2, 3], 2)
    past.add(third, [0, 1, 2])
    assert past.continued(third, 3) == Found([3, 4, 5], 5)
    # Of another turn, or another prompt, nothing is known.
    assert past.continued(past.begin(0, 1), 4) == NOTHING
    assert past.continued(past.begin(1, 0), 4) == NOTHING
