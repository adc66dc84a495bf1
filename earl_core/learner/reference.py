"""One rank of the `reference` worker group, which holds the frozen initial policy."""

from __future__ import annotations

from earl_core.learner.model_worker import ModelWorker


class ReferenceWorker(ModelWorker):
    """Holds the initial model; its optimizer never gets a state, so it costs nothing."""

    stage = "reference"
