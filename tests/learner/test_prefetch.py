"""Parameters of a unit are on their way before its turn, as FSDP2 does it unasked."""

from __future__ import annotations

from pathlib import Path

from tests.learner.gather_order import LAYERS
from tests.learner.launched import launch


def test_gathers_are_begun_ahead_of_the_computation_without_being_told(tmp_path: Path) -> None:
    (passes,) = launch("tests.learner.gather_order", "begun", 1, tmp_path)
    # Forward, the host begins a gather on a stream of its own when it has queued the layer before,
    # and waits for nothing in between: fake tensors would raise where it read from the device.
    # One for the embedding, and one for each layer until here.
    assert passes["forward"] == [[layer, layer + 2] for layer in range(LAYERS)]
    # Backward, the next layer's, at last the embedding's, is begun before a layer computes. Norm
    # and head were kept.
    expected = [[layer, LAYERS - layer + 1] for layer in reversed(range(LAYERS))]
    assert passes["backward"] == expected
