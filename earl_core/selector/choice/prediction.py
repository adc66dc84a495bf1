"""The prediction of one candidate, and the error where none is feasible."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.selector.model.candidates import RuledOut
from earl_core.system.errors import EarlError


class Prediction(NamedTuple):
    """One candidate under one load.

    seconds: of the stage, infinite when it cannot run. peak, budget: bytes on one device. filled:
    for engines with a KV cache of fixed size, the share of it that the sequences offered would take
    (above 1 they queue). measured: how much measurement stands behind the seconds, 0 (a guess) to
    1. problem: why the candidate is infeasible; empty when it is not.

    Of rollouts that overlap with updates: busy: seconds that its engines work for an iteration, on
    the mean. waiting: those of them in which they wait for environments, or for one another at a
    barrier. whole: seconds from the
    first to the last token of an iteration's episodes.
    """

    candidate: StageDeployment
    seconds: float
    peak: float
    budget: float
    filled: float = 0.0
    measured: float = 0.0
    problem: str = ""
    busy: float = 0.0
    waiting: float = 0.0
    whole: float = 0.0

    @property
    def allowed(self) -> bool:
        """True when the candidate can be chosen."""
        return not self.problem and math.isfinite(self.seconds)

    @property
    def guess(self) -> bool:
        """True when roofline and memory formula say more about it than measurements."""
        return self.measured < 0.5


class NoFeasiblePlan(EarlError):
    """No stage deployment of a stage fits the memory. `nearest`: the candidate that came closest
    (its `peak` and `budget` are bytes on one device), None when none is on offer, as `out` says."""

    def __init__(
        self, stage: str, nearest: Prediction | None, out: Sequence[RuledOut] = ()
    ) -> None:
        self.stage, self.nearest = stage, nearest
        none = f"no stage deployment of the {stage}"
        if nearest is None:
            kinds = {re.sub(r"\d+", "", o.reason): f"{o.label}: {o.reason}" for o in out}
            super().__init__(f"infeasible: {none} is on offer: {'; '.join(kinds.values())}")
            return
        super().__init__(
            f"infeasible: {none} fits the memory: {nearest.candidate.label}: {nearest.problem}",
            remedy="add devices or memory, lower rollout.max_model_len if it is larger than "
            "needed, or free what selector.fixed_fields and selector.tensor_parallel hold",
        )
