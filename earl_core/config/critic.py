"""The critic: a model of its own that expects returns."""

from __future__ import annotations

from pydantic import Field

from earl_core.config.update import UpdateConfig
from earl_core.system.settings import Settings


class CriticConfig(Settings):
    """A critic that begins as the initial policy, with one output that begins at 0, and is trained
    on each iteration's returns. What it has no setting for, it has from `update`."""

    learning_rate: float = Field(
        default=1e-5,
        gt=0,
        description="Peak learning rate of the critic, on the update's schedule; about ten times "
        "the policy's is usual.",
    )
    clip: float | None = Field(
        default=0.2,
        gt=0,
        description="Distance from the values before its update, in reward units, beyond which a "
        "value is moved no further; null: any.",
    )
    epochs: int | None = Field(
        default=None,
        ge=1,
        description="Passes of the critic over the episodes of an iteration; null: update.epochs.",
    )
    minibatches: int | None = Field(
        default=None,
        ge=1,
        description="Optimizer steps of the critic in each of them; null: update.minibatches. A "
        "regression takes many small steps well.",
    )
    warmup_iterations: int = Field(
        default=0,
        ge=0,
        description="First iterations in which the critic alone is trained, and the policy stays "
        "the initial one; its own schedule and warm-up begin after them.",
    )

    def settings(self, update: UpdateConfig) -> UpdateConfig:
        """The update's settings, with the critic's own in their place."""
        own = {
            "learning_rate": self.learning_rate,
            "epochs": self.epochs or update.epochs,
            "minibatches": self.minibatches or update.minibatches,
        }
        return update.model_copy(update=own)
