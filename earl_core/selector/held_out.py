"""The memory model's error: each measured peak predicted from all the others of its stage."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from earl_core.deployment.stages import SELECTABLE
from earl_core.selector.choice.predict import Predictor
from earl_core.selector.choice.selection import SelectionInput
from earl_core.selector.model.calibration import Calibration, Peak
from earl_core.selector.model.roofline import Load
from earl_core.selector.profile.profile_table import ProfilePoint, ProfileTable, candidate_of_key

WELL = 0.1
"""A prediction this near to the measured peak, as a share of it, counts as good."""


class HeldOutError(NamedTuple):
    """A stage's error, as shares of the measured peaks.

    peaks: how many were measured. median, worst: of |predicted / measured - 1| where each was
    predicted by a calibration with the others. well: the share of them within `WELL`. formula: the
    median error of the formula alone, never calibrated.
    """

    stage: str
    peaks: int
    median: float
    worst: float
    well: float
    formula: float


def profile_peaks(given: SelectionInput, table: ProfileTable) -> list[Peak]:
    """The profile's measured peaks beside what the formula says: food for `Calibration`."""
    predictor = Predictor(given.model_copy(update={"profile": ProfileTable()}))
    measured = [p for p in table.points if p.peak_bytes > 0 and not p.out_of_memory]
    return [_peak(predictor, point) for point in measured]


def held_out_errors(given: SelectionInput, table: ProfileTable) -> list[HeldOutError]:
    """Return the errors by stage, for stages with at least three peaks."""
    peaks = profile_peaks(given, table)
    own = {stage: [peak for peak in peaks if peak.stage == stage] for stage in SELECTABLE}
    return [_errors(stage, mine) for stage, mine in own.items() if len(mine) >= 3]


def _errors(stage: str, peaks: Sequence[Peak]) -> HeldOutError:
    errors = []
    for index, peak in enumerate(peaks):
        others = Calibration(peaks=(*peaks[:index], *peaks[index + 1 :]))
        errors.append(abs(others.correct(stage, peak.predicted) / peak.measured - 1))
    return HeldOutError(
        stage=stage,
        peaks=len(peaks),
        median=statistics.median(errors),
        worst=max(errors),
        well=sum(error <= WELL for error in errors) / len(errors),
        formula=statistics.median(abs(p.predicted / p.measured - 1) for p in peaks),
    )


def _peak(predictor: Predictor, point: ProfilePoint) -> Peak:
    candidate = candidate_of_key(point.key, predictor.hardware.devices)
    sequences = point.requests
    if candidate.stage == "rollout":
        most = predictor.given.rollout.max_running_requests
        candidate = candidate._replace(max_running_requests=most)
        sequences *= candidate.replicas
    load = Load(max(1, round(sequences)), point.context, point.context, point.context)
    formula = predictor.formula_peak(candidate, load)
    return Peak(stage=candidate.stage, predicted=formula, measured=point.peak_bytes)
