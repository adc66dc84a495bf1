"""A learner whose ranks can be told, while they live, at which fault point to fail."""

from __future__ import annotations

import os

from earl_core.learner.update_worker import LearnerWorker


class FaultyLearner(LearnerWorker):
    """`arm("")` takes the fault back."""

    def arm(self, fault: str) -> None:
        os.environ["EARL_FAULT"] = fault
