"""A comparison of trainings means nothing unless they learnt: what every test of equality asserts.

Advantages of episodes with equal returns are zero, and so are the gradients; then runs with other
data, in another order, or with an update lost, end with equal weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from earl_core.pretrained.adapter_directory import PAIRS_FILE, is_adapter
from earl_core.weights.load import model_files

SMALLEST_NORM = 1e-3
"""Of a gradient that is more than rounding, which is 1e-6 or less; most are 0.1 to 10 here."""

SMALLEST_CHANGE = 1e-4
"""Of some weight; one step of Adam changes it by about the learning rate, 1e-3 or more here."""


def assert_learnt(
    norms: Iterable[float], before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]
) -> None:
    """Every update had a gradient, and the weights are others than before."""
    seen = list(norms)
    assert seen, "nothing was learnt: there was no update"
    assert min(seen) > SMALLEST_NORM, f"nothing was learnt: gradient norms {seen}"
    assert largest_change(before, after) > SMALLEST_CHANGE, "the weights are the initial ones"


def largest_change(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """The largest difference between any weights of equal names; at least one name is in both."""
    names = one.keys() & other.keys()
    assert names
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in names)


def weights_in(model: Path) -> dict[str, torch.Tensor]:
    """The weights of a model directory, or of an adapter's."""
    files = [model / PAIRS_FILE] if is_adapter(model) else model_files(model)
    return {name: each for file in files for name, each in load_file(file).items()}
