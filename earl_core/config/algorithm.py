"""The algorithm: advantage estimator, policy loss, KL, importance correction, aggregation."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from earl_core.config.settings import Options, Settings


def _estimator(given: dict[str, Any]) -> str:
    return "k1" if given.get("placement") == "reward" else "k3"


class KLConfig(Settings):
    """Kullback-Leibler penalty to the frozen initial policy."""

    placement: Literal["none", "loss", "reward"] = "none"
    estimator: str = Field(
        default_factory=_estimator,
        description="k1, k2, k3, or an import path; by default k3 in the loss and k1 in the "
        "reward, where the gradient is the divergence's for k1 alone.",
    )
    coefficient: float = Field(default=0.0, ge=0)


class ImportanceConfig(Settings):
    """Truncated importance correction between the engine's and the trainer's log-probs."""

    cap: float = Field(default=2.0, gt=0, description="Weights above this are cut to it.")
    level: Literal["token", "sequence"] = "token"


class AlgorithmConfig(Settings):
    """Names come from the registries in `earl_core.algorithms`; other keys are parameters."""

    advantage: Options = Field(default_factory=lambda: {"name": "grpo"})
    policy_loss: Options = Field(default_factory=lambda: {"name": "ppo_clip"})
    aggregation: Options = Field(default_factory=lambda: {"name": "token_mean"})
    kl: KLConfig = KLConfig()
    importance_correction: ImportanceConfig | None = None
    entropy_coefficient: float = Field(
        default=0.0, ge=0, description="Added to the loss times -entropy."
    )

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
