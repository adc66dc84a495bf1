"""What the policy's update does otherwise where the guard has decided that it is to be cautious."""

from __future__ import annotations

from collections.abc import Iterable

from earl_core.config import RunConfig
from earl_core.dispatch import Manifest
from earl_core.guard.decision import GUARD, decision_of

RATE_FACTOR = 0.3
"""Of the learning rate, each time."""

KL_FACTOR = 3.0
"""Of the KL coefficient, in the loss or in the reward, each time."""


def caution_in(read: Iterable[Manifest]) -> int:
    """How many times the factors apply to an update that reads these manifests."""
    return max((decision_of(each).caution for each in read if GUARD in each.outputs), default=0)


def caution_in_key(stage: str, read: Iterable[Manifest]) -> list[str]:
    """What the key of a stage covers besides the data of what it reads: an advantage's shards do
    not say it. A critic is trained as ever: slower, its values would fall behind what happens."""
    return ["cautious"] * caution_in(read) if stage == "update" else []


def caution_text(config: RunConfig, times: int) -> str:
    """Say what a cautious update does in a run of this configuration."""
    rate = f"the learning rate is x {RATE_FACTOR**times:.2g}"
    if config.algorithm.kl.placement == "none":
        return f"cautious: {rate}; there is no KL term whose coefficient could rise"
    return f"cautious: {rate}, the KL coefficient x {KL_FACTOR**times:g}"
