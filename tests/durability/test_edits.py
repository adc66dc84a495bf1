"""Edits of everything that a run keeps on disk and in shared memory."""

from __future__ import annotations

import pytest

from tests.durability.test_crashes import run


@pytest.mark.parametrize("edits", [70, pytest.param(400, marks=pytest.mark.campaign)])
def test_an_edited_run_is_refused_in_a_sentence_or_ends_with_equal_weights(edits: int) -> None:
    ends = run("tests.durability.edits", "--edits", str(edits), "--seed", "3")["ends"]
    assert sum(ends.values()) == edits
    # Both outcomes must occur, or the edits do not reach what they should.
    assert ends["equal"] > edits // 4
    assert ends["refused"] > edits // 40
