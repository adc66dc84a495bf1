"""Loading: every rank reads its own parts, and its memory holds no more."""

from __future__ import annotations

from pathlib import Path

from earl_core.deployment.shapes import ModelShape
from earl_core.selector.model.catalogue import MODELS
from tests.learner.launched import launch
from tests.learner.loading_ranks import write_model

ROOM = 64 * 2**20
"""Of the modules of 80 layers, of what a process imports late, and of its small objects."""

WIDE = ModelShape(
    model_type="llama",
    hidden_size=2048,
    layers=16,
    attention_heads=32,
    key_value_heads=8,
    intermediate_size=5632,
    vocabulary=32000,
    max_positions=2048,
)


def test_eight_ranks_hold_their_parts_of_a_model_and_never_more(tmp_path: Path) -> None:
    write_model(tmp_path / "model", WIDE, numbered=True)
    found = launch("tests.learner.loading_ranks", "load_sharded", 8, tmp_path / "ranks")
    assert sum(each["parts"] for each in found) == 4 * WIDE.parameters
    for rank, each in enumerate(found):
        assert each["private"] <= 1.3 * each["parts"] + each["largest"] + ROOM, (rank, each)


def test_nobody_holds_a_whole_copy_of_72b_parameters(tmp_path: Path) -> None:
    (found,) = launch("tests.learner.loading_ranks", "load_the_largest", 1, tmp_path)
    assert 4 * MODELS["qwen2.5-72b"].parameters < 129 * found["parts"]
    # The peak has the pages of the files that were read, half as many bytes as the parts.
    assert found["private"] <= (1.3 + 0.5) * found["parts"] + ROOM, found
