"""Gradients in bf16 that several ranks add up are as exact as one rank's."""

from __future__ import annotations

from pathlib import Path

from tests.learner.launched import launch
from tests.learner.sum_ranks import RANKS


def test_four_ranks_do_not_add_to_the_error_of_bf16(tmp_path: Path) -> None:
    """Norms over tensor ranks; keys and values over context ranks, in attention and alone."""
    for rank, errors in enumerate(launch("tests.learner.sum_ranks", "errors", RANKS, tmp_path)):
        assert set(errors) == {"norm", "query", "key", "value", "exchange"}
        for name, (one, several) in errors.items():
            assert one > 1e-4, name
            assert several <= 1.2 * one, (rank, name, one, several)
