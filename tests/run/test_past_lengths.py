"""Lengths that are expected of prompts, by the episodes that a run has kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from earl_core.run.episodes import SCHEMA, EpisodesDamaged
from earl_core.run.past_lengths import PastLength, PastLengths, Prompt
from earl_core.trajectory.schema import SAMPLE_BITS

GROUP = 2
Length = Callable[[int, int], int]


def keep(
    directory: Path, iteration: int, prompts: Sequence[Prompt], rows: Sequence[int], length: Length
) -> Path:
    """Write an iteration's file. rows: texts of an environment's prompts, after which they come
    again. length: of a row's answers; the second episode of a group has two tokens more."""
    columns: dict[str, list[object]] = {
        name: [] for name in ("episode_id", "sample_id", "prompt_id", "environment", "tokens")
    } | {"loss_mask": []}
    for number, (label, prompt) in enumerate(prompts):
        for member in range(GROUP):
            begins = [1, 50 + rows[prompt % len(rows)], 2, len(label)]
            answer = length(rows[prompt % len(rows)], iteration) + 2 * member
            episode = (iteration * 1000 + number) * GROUP + member
            mine = (
                episode,
                episode << SAMPLE_BITS,
                prompt,
                label,
                begins + [9] * (answer + 3),
                [0] * len(begins) + [1] * answer + [0] * 3,
            )
            for column, value in zip(columns.values(), mine, strict=True):
                column.append(value)
    path = directory / "iterations" / f"{iteration:06d}" / "episodes.parquet"
    path.parent.mkdir(parents=True)
    fields = [SCHEMA.field(name) for name in columns]
    pq.write_table(pa.table(columns, pa.schema(fields)), path)
    return path


def alone(first: int, count: int) -> list[tuple[str, int]]:
    return [("", number) for number in range(first, first + count)]


def group(length: int) -> PastLength:
    """Two episodes, of which the second has two tokens more: their variance is 2."""
    return PastLength(length + 1, 1.0)


def longer(row: int, iteration: int) -> int:
    return 10 * (row + 1) + iteration


def test_a_prompt_that_comes_again_has_the_length_of_its_newest_episodes(tmp_path: Path) -> None:
    for iteration in range(4):
        keep(tmp_path, iteration, alone(iteration * 4, 4), rows=range(6), length=longer)
    past = PastLengths(tmp_path, 2**30)
    # Row r was last played in this iteration, of those up to the asked one.
    newest = {2: [1, 1, 2, 2, 2, 2], 3: [3, 3, 3, 3, 2, 2]}
    for last, played in newest.items():
        wanted = [group(longer(number % 6, played[number % 6])) for number in range(16, 24)]
        assert past.expected(alone(16, 8), last) == wanted
    assert past.expected(alone(3, 1), 3) == [group(longer(3, 3))]


def test_nothing_is_expected_before_prompts_come_again(tmp_path: Path) -> None:
    keep(tmp_path, 0, alone(0, 8), rows=range(10), length=longer)
    past = PastLengths(tmp_path, 2**30)
    assert past.expected(alone(8, 3), 0) == [None] * 3
    assert past.expected(alone(8, 3), -1) == [None] * 3
    # Row 9 was not kept.
    keep(tmp_path, 1, [*alone(8, 1), *alone(10, 4)], rows=range(10), length=longer)
    assert past.expected(alone(19, 2), 1) == [None, group(longer(0, 1))]


def test_a_text_that_stands_twice_is_no_repetition_of_all(tmp_path: Path) -> None:
    """The first eight of ten prompts have each of four texts twice."""
    texts = [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    for iteration in range(2):
        keep(tmp_path, iteration, alone(10 * iteration, 10), rows=texts, length=longer)
    found = PastLengths(tmp_path, 2**30).expected(alone(20, 10), 1)
    # Of the first four texts there are two groups: the variance of 1, 3, 1, 3 is 4 / 3.
    twice = [PastLength(longer(text, 1) + 1, 4 / 3 / 4) for text in range(4)]
    assert found == [*twice, *twice, group(longer(4, 1)), group(longer(5, 1))]


def test_rows_that_were_chosen_repeat_nothing(tmp_path: Path) -> None:
    """Two of them that stand side by side and are the same text."""
    rows = [3, 40, 77, 500, 501]
    texts = [*range(501), 500]
    keep(tmp_path, 0, [("", row) for row in rows], rows=texts, length=longer)
    past = PastLengths(tmp_path, 2**30)
    assert past.expected([("", 78), ("", 77)], 0) == [None, group(longer(77, 0))]


def test_each_environment_of_a_mixture_has_prompts_of_its_own(tmp_path: Path) -> None:
    for iteration in range(2):
        one, other = ([(label, 3 * iteration + n) for n in range(3)] for label in ("a", "bb"))
        keep(tmp_path, iteration, [*one, *other], rows=range(3), length=longer)
    # Their texts differ, and their numbers do not.
    path = keep(tmp_path, 2, [("a", 6), ("bb", 6)], rows=range(3), length=lambda *_: 99)
    past = PastLengths(tmp_path, 2**30)
    asked = [("bb", 9), ("a", 7), ("c", 0)]
    assert past.expected(asked, 2) == [group(99), group(longer(1, 1)), None]
    path.unlink()
    assert past.expected(asked, 2) == [group(longer(0, 1)), group(longer(1, 1)), None]


def test_no_more_is_read_than_the_bound(tmp_path: Path) -> None:
    """Nor again, and half of what may be kept at most."""
    paths = [
        keep(tmp_path, k, alone(4 * k, 4), rows=range(4), length=lambda *_: 7) for k in range(4)
    ]
    sizes = [path.stat().st_size for path in paths]
    paths[1].write_bytes(b"damaged")
    past = PastLengths(tmp_path, 2 * (sizes[2] + sizes[3]))
    assert past.expected(alone(16, 2), 3) == [group(7)] * 2
    with pytest.raises(EpisodesDamaged):
        past.expected(alone(16, 2), 2)
    with pytest.raises(EpisodesDamaged):
        PastLengths(tmp_path, 2**30).expected(alone(16, 2), 3)
