"""The transfer model follows the law that it states."""

from __future__ import annotations

import pytest

from tools.traffic import ROUND_SECONDS, predict


@pytest.mark.parametrize("hosts", [2, 4, 16, 125])
@pytest.mark.parametrize(
    ("local", "needed", "copies", "uneven"),
    [(0.0, 1.0, 1.0, 0.0), (0.5, 1.0, 1.0, 0.06), (0.75, 0.5, 2.0, 0.2)],
)
def test_large_batches_speed_up_by_the_law(
    hosts: int, local: float, needed: float, copies: float, uneven: float
) -> None:
    arguments = (hosts, 1e12, 25e9, local, needed, copies, uneven)
    ratio = predict(*arguments, "single_controller") / predict(*arguments, "direct")
    law = 2 * (hosts - 1) / ((1 - local) * needed * copies * (1 + uneven))
    assert ratio == pytest.approx(law, rel=1e-3)


def test_what_does_not_move_costs_one_round() -> None:
    assert predict(16, 1e9, 250e6, 1.0, 1.0, 1.0, 0.0, "direct") == ROUND_SECONDS


def test_impossible_networks_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one host"):
        predict(0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, "direct")
    with pytest.raises(ValueError, match="neither"):
        predict(2, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, "pigeon")  # type: ignore[arg-type]
