"""Which values are a reward, or a metric, of an environment."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from earl_core.environments.base import StepResult
from earl_core.environments.rewards.results import step_result
from earl_core.system.frames import WireError


@pytest.mark.parametrize(
    ("given", "value"),
    [
        (True, 1.0),
        (np.bool_(True), 1.0),
        (np.bool_(False), 0.0),
        (np.float16(0.5), 0.5),
        (np.int64(-3), -3.0),
        (np.array(0.25), 0.25),
        (torch.tensor(True), 1.0),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (torch.tensor(0.5, requires_grad=True), 0.5),
        (Decimal("0.125"), 0.125),
        (Fraction(3, 4), 0.75),
    ],
)
def test_numbers_of_every_kind_are_rewards_and_metrics(given: Any, value: float) -> None:
    read = step_result(StepResult([], given, True, {"metrics": {"given": given}}))
    assert (read["reward"], read["info"]["metrics"]) == (value, {"given": value})


@pytest.mark.parametrize(
    "given",
    ["1", None, 1j, np.array([1.0]), np.array("1"), torch.tensor(math.nan), Decimal("NaN"),
     Decimal("sNaN"), Decimal("1e400"), np.float64("inf"), np.datetime64("2026-01-01"), 10**400],
)  # fmt: skip
def test_what_is_no_finite_number_is_no_reward(given: Any) -> None:
    with pytest.raises(WireError, match="must be a finite number"):
        step_result(StepResult([], given, True))
