"""Edits of everything that a run keeps on disk and in shared memory."""

from __future__ import annotations

from tests.durability.test_crashes import run


def test_an_edited_run_is_refused_in_a_sentence_or_ends_with_equal_weights() -> None:
    ends = run("tests.durability.edits", "--edits", "200", "--seed", "3")["ends"]
    assert sum(ends.values()) == 200
    # Both outcomes must occur, or the edits do not reach what they should.
    assert ends["equal"] > 50
    assert ends["refused"] > 5
