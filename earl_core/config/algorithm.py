"""The algorithm: advantage estimator, policy loss, KL, importance correction, aggregation."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from earl_core.system.settings import Options, Place, Settings


def _estimator(given: dict[str, Any]) -> str:
    return "k1" if given.get("placement") == "reward" else "k3"


INITIAL = "initial"
"""The reference that is the run's own initial policy."""


class PenaltyConfig(Settings):
    """A frozen reference, and what a nat of divergence from it costs."""

    reference: Place = Field(
        default=INITIAL,
        description="The frozen model: `initial`, a model directory, or a run's checkpoint as in "
        "`model.from` (`RUN`, `RUN@12`, `RUN@best`). Another model must have the policy's "
        "vocabulary; its size and architecture are its own.",
    )
    coefficient: float = Field(
        default=0.0,
        ge=0,
        description="Coefficient of the penalty, for each nat and token: in the loss, or in "
        "reward units. 0: none.",
    )
    until: int | None = Field(
        default=None,
        ge=1,
        description="Iteration at which the coefficient has fallen to 0: that of iteration k is "
        "coefficient x max(0, 1 - k / until). None: it stays.",
    )

    def at(self, iteration: int) -> float:
        """The coefficient of an iteration, from 0."""
        left = 1.0 if self.until is None else max(0.0, 1.0 - iteration / self.until)
        return self.coefficient * left


class KLConfig(PenaltyConfig):
    """Kullback-Leibler penalty to a frozen reference: the initial policy, or a teacher."""

    placement: Literal["none", "loss", "reward"] = Field(
        default="none",
        description="Place of the penalty. none: no penalty, and no reference model; the "
        "coefficients must be 0. loss: a term of the loss. reward: subtracted from the rewards of "
        "the tokens before advantages are computed.",
    )
    estimator: str = Field(
        default_factory=_estimator,
        description="KL estimator: k1, k2, k3, or an import path. By default k3 in the loss and "
        "k1 in the reward, where the gradient is the divergence's for k1 alone.",
    )


class ImportanceConfig(Settings):
    """Importance correction between the engine's and the trainer's log-probs, bounded."""

    cap: float = Field(default=2.0, gt=0, description="Upper bound of the ratio trainer / engine.")
    low: float = Field(
        default=0.0, ge=0, description="Lower bound of the ratio, below the upper one."
    )
    outside: Literal["cut", "mask"] = Field(
        default="cut",
        description="Weight of a ratio outside of the bounds. cut: the nearer bound. mask: 0.",
    )
    level: Literal["token", "geometric", "sequence"] = Field(
        default="token",
        description="token: each token is weighted by its own ratio. sequence: all tokens of an "
        "episode are weighted by the product of its ratios. geometric: by their geometric mean.",
    )
    anchor: Literal["recompute", "rollout"] = Field(
        default="recompute",
        description="Policy that the ratios of the loss are to. recompute: the trained one before "
        "the update, whose log-probs cost one forward pass more; the weights above account for the "
        "engine's. rollout: the one that sampled, by the engine's log-probs; the loss's own bounds "
        "then bound all of the difference, and there are no weights.",
    )

    @model_validator(mode="after")
    def _bounds_are_used(self) -> ImportanceConfig:
        unused = self.model_fields_set & {"cap", "low", "outside", "level"}
        if self.anchor == "rollout" and unused:
            raise ValueError(
                f"algorithm.importance_correction.{min(unused)} bounds weights, which there are "
                "none of with anchor `rollout`: remove it, or set anchor to `recompute`"
            )
        return self

    @model_validator(mode="after")
    def _ordered(self) -> ImportanceConfig:
        if self.low >= self.cap:
            raise ValueError(
                f"algorithm.importance_correction.low ({self.low:g}) must be below its cap "
                f"({self.cap:g})"
            )
        return self


class AlgorithmConfig(Settings):
    """Advantages and loss. Each part is chosen by its `name`; its other keys are its parameters."""

    advantage: Options = Field(
        default={"name": "grpo"},
        description="Advantage estimator: a name, an import path `package.module:Class`, or a "
        "mapping of `name` and its parameters. By default grpo.",
    )
    policy_loss: Options = Field(
        default={"name": "ppo_clip"},
        description="Policy loss of a token, in the same form. By default ppo_clip.",
    )
    aggregation: Options = Field(
        default={"name": "token_mean"},
        description="Aggregation that makes one number of the losses of all tokens, in the same "
        "form. By default token_mean.",
    )
    kl: KLConfig = Field(
        default=KLConfig(), description="KL penalty to the initial policy. By default none."
    )
    importance_correction: ImportanceConfig | None = Field(
        default=None,
        description="Importance weights of tokens for the difference between the engine's and "
        "the trainer's log-probs; null: none.",
    )
    entropy_coefficient: float = Field(
        default=0.0,
        ge=0,
        description="Coefficient of the entropy bonus, for each nat and token; 0: the entropy is "
        "only measured.",
    )
    router_aux_loss_coef: float = Field(
        default=0.0,
        ge=0,
        description="Coefficient of the loss that balances the experts of a mixture, for each "
        "routed layer experts x sum of f_i P_i (Switch Transformer), over the tokens of an "
        "optimizer step whose experts were recorded; 0.001 is usual, 0: none.",
    )

    @property
    def from_rollout(self) -> bool:
        """True when the loss's ratios are to the policy that sampled, by setting."""
        correction = self.importance_correction
        return correction is not None and correction.anchor == "rollout"

    @property
    def weighing(self) -> dict[str, Any] | None:
        """Parameters of `ImportanceCorrection`; None: no loss is weighted."""
        if self.importance_correction is None or self.from_rollout:
            return None
        return self.importance_correction.model_dump(exclude={"anchor"})

    @field_validator(
        *("advantage", "policy_loss", "aggregation"),
        mode="before",
        json_schema_input_type=str | dict[str, Any],
    )
    @classmethod
    def _named(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, dict) and "name" not in value:
            raise ValueError("give the algorithm's part as a name, or as a mapping with a `name`")
        return value
