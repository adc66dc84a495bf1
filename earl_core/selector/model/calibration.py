"""Corrects the memory formula by measured peaks."""

from __future__ import annotations

import bisect

import numpy as np
from pydantic import Field

from earl_core.system.settings import Settings


class Peak(Settings):
    """One measured peak beside what the formula said, bytes on one device."""

    stage: str
    predicted: float = Field(gt=0)
    measured: float = Field(gt=0)
    out_of_memory: bool = Field(
        default=False, description="The measured bytes were not enough: the true peak is above."
    )


_OOM_MARGIN = 1.02


class Calibration(Settings):
    """Corrects the formula by what was measured, stage by stage, without losing its order.

    With peaks at different sizes the correction is measured = a + b · predicted, b between 1/2
    and 3, by least squares of relative errors, and at least a quarter of the prediction; with one
    size only, a factor. Never measured: 1.
    """

    peaks: tuple[Peak, ...] = ()

    def correct(self, stage: str, predicted: float) -> float:
        """The calibrated peak. Never decreases as `predicted` grows."""
        return self.corrector(stage)(predicted)

    def corrector(self, stage: str) -> _Corrector:
        """The stage's correction, worked out once for many candidates."""
        return _Corrector([peak for peak in self.peaks if peak.stage == stage])


class _Corrector:
    def __init__(self, peaks: list[Peak]) -> None:
        self._offset, self._slope = _line([p for p in peaks if not p.out_of_memory])
        failed = sorted((p.predicted, p.measured * _OOM_MARGIN) for p in peaks if p.out_of_memory)
        self._failed = [predicted for predicted, _ in failed]
        self._floors: list[float] = []
        for _, floor in failed:
            self._floors.append(max([floor, *self._floors[-1:]]))

    def __call__(self, predicted: float) -> float:
        # A steep line has a negative offset, which must not make small candidates free of charge.
        value = max(self._offset + self._slope * predicted, predicted / 4)
        # What once ran out of memory needs more than there was, and so does all that is larger.
        place = bisect.bisect_right(self._failed, predicted * (1 + 1e-9))
        return max(value, self._floors[place - 1]) if place else value


def _line(peaks: list[Peak]) -> tuple[float, float]:
    if not peaks:
        return 0.0, 1.0
    factor = sum(p.measured / p.predicted for p in peaks) / len(peaks)
    sizes = [p.predicted for p in peaks]
    if max(sizes) < 1.1 * min(sizes):
        return 0.0, factor
    measured = np.array([p.measured for p in peaks])
    slope, _ = np.polyfit(sizes, measured, 1, w=1 / measured)
    slope = min(3.0, max(0.5, float(slope)))
    offset = np.average(measured - slope * np.array(sizes), weights=measured**-2)
    return float(offset), slope
