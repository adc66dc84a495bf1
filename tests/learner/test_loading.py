"""Loading: every rank reads its own parts, and its memory holds no more."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from earl_core.deployment.shapes import ModelShape
from earl_core.selector.model.catalogue import MODELS
from tests.learner.launched import launch
from tests.learner.loading_ranks import write_model

WIDE = ModelShape(
    model_type="llama",
    hidden_size=2048,
    layers=8,
    attention_heads=32,
    key_value_heads=8,
    intermediate_size=5632,
    vocabulary=16000,
    max_positions=2048,
)


def test_four_ranks_hold_their_parts_of_a_model_and_never_more(tmp_path: Path) -> None:
    write_model(tmp_path / "model", WIDE, numbered=True)
    found = launch("tests.learner.loading_ranks", "load_sharded", 4, tmp_path / "ranks")
    shutil.rmtree(tmp_path / "model")  # 0.8 GB, which pytest would keep
    assert sum(each["parts"] for each in found) == 4 * WIDE.parameters
    for rank, each in enumerate(found):
        assert 0.9 * each["parts"] < each["anonymous"] <= 1.3 * each["parts"], (rank, each)


@pytest.mark.campaign
def test_nobody_holds_a_whole_copy_of_72b_parameters(tmp_path: Path) -> None:
    (found,) = launch("tests.learner.loading_ranks", "load_the_largest", 1, tmp_path)
    assert 4 * MODELS["qwen2.5-72b"].parameters < 129 * found["parts"]
    assert 0.9 * found["parts"] < found["anonymous"] <= 1.3 * found["parts"], found
