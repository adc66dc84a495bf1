"""The bytes of recorded experts that the update's benchmark counts."""

from __future__ import annotations

import pytest

from benchmarks.update_episodes import workload
from benchmarks.update_routing import routing_bytes
from benchmarks.update_side import training_samples


@pytest.mark.parametrize("ranks", [1, 2])
def test_context_ranks_read_what_they_need(ranks: int) -> None:
    read, hashed = routing_bytes(training_samples(workload(None, 8)), 1024, ranks)
    assert read == 1
    assert 1 + ranks * 8 / 384 < hashed < 1 + ranks * 5 * 8 / 384
