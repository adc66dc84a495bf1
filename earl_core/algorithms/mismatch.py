"""The watch over the difference between the engine that samples and the trainer that learns.

With equal weights both should give a token the same log-prob, up to rounding. A difference beyond
rounding means that the trainer learns from samples of another policy than it believes, and no other
metric shows it. An engine is measured by the probe of each version that it loads, before it plays
an episode, and every iteration before its first optimizer step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from earl_core.system.errors import EarlError


class _Explained(NamedTuple):
    """Differences in nats that rounding explains, above which is a warning; a bound of the mean."""

    mean: float
    p95: float
    largest: float
    bound: float


# Seen in bf16 (135M parameters, vLLM and torch engine): mean 0.02-0.08, p95 0.11-0.23, largest
# 0.47. Rare tokens of larger models lie further off, so the largest gets more room.
_BF16 = _Explained(mean=0.12, p95=0.4, largest=3.0, bound=0.3)
# Seen in float32: 1e-5.
_FP32 = _Explained(mean=1e-3, p95=3e-3, largest=0.1, bound=0.01)

# Tokens that are likeliest to one side only: where two are as likely, rounding decides.
_MOST_OTHERS = 0.5

_PRECISION = (
    "precision (try rollout.dtype float32 with update.precision fp32, or model.float32_head)"
)

# A difference that is so much larger at later positions has to do with positions.
_GROWING = 3.0


class UpdateRefused(EarlError):
    """A step that would harm the weights was not applied: the gradient is not finite, or engine and
    trainer differ by more than `update.max_mismatch`."""

    @classmethod
    def of_norm(cls, norm: float, tokens: int) -> UpdateRefused:
        """For a gradient that is not finite, of so many trained tokens."""
        return cls(
            f"The gradient of a minibatch with {tokens} trained tokens is {norm}: its step was not "
            "applied. Lower update.learning_rate, or use update.precision fp32."
        )


@dataclass(frozen=True)
class MismatchWatch:
    """Judges the `mismatch_*` metrics of an iteration.

    float32: whether engine and trainer both compute in it. temperature: of the rollout. bound: of
    the mean, in nats; None: by precision.
    """

    float32: bool
    temperature: float = 1.0
    bound: float | None = None

    def check(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Raise UpdateRefused when the mean exceeds the bound."""
        if metrics["mismatch_mean"] > self._bound:
            raise UpdateRefused(
                f"{self._found(metrics)}; update.max_mismatch allows {self._bound:g} on average. "
                f"The update of iteration {iteration} was stopped before this step. "
                f"{self._causes(metrics, iteration)}"
            )

    def unlike(self, probe: Mapping[str, float], version: int) -> str | None:
        """A sentence when an engine that has loaded this version answers its probe as another model
        would. probe: the `probe_*` metrics."""
        mean, others = probe.get("probe_mismatch_mean", 0.0), probe.get("probe_other_share", 0.0)
        if mean <= self._bound and others <= _MOST_OTHERS:
            return None
        return (
            f"the engine does not answer as policy version {version} does: after beginnings of "
            f"episodes the trainer's likeliest token is not its own in {others:.0%}, and where it "
            f"is, their log-probs differ by {mean:.3g} nats on average; {_MOST_OTHERS:.0%} and "
            f"{self._bound:g} (update.max_mismatch) are allowed. No episode was played. Likely: "
            "stale weights or a stale prefix cache in the engine; "
            f"{'' if self.float32 else f'{_PRECISION}; '}"
            "a model that the engine computes otherwise than transformers."
        )

    def warning(self, metrics: Mapping[str, float], iteration: int) -> str | None:
        """A sentence when the difference is more than rounding explains. metrics: of an update, or
        those of a rollout, with a probe's."""
        metrics = _of_probe(metrics) or metrics
        if "mismatch_mean" not in metrics:
            return None
        explained = self._explained
        seen = tuple(metrics[f"mismatch_{name}"] for name in ("mean", "p95", "max"))
        if all(value <= most for value, most in zip(seen, explained[:3], strict=True)):
            return None
        return (
            f"iteration {iteration}: {self._found(metrics)}, more than rounding explains "
            f"({explained.mean:g}, {explained.p95:g}, {explained.largest:g}). "
            f"{self._causes(metrics, iteration)}"
        )

    @property
    def _explained(self) -> _Explained:
        return _FP32 if self.float32 else _BF16

    @property
    def _bound(self) -> float:
        return self._explained.bound if self.bound is None else self.bound

    def _found(self, metrics: Mapping[str, float]) -> str:
        return (
            "the engine's and the trainer's log-probs of the sampled tokens differ by "
            f"{metrics['mismatch_mean']:.3g} nats on average (95th percentile "
            f"{metrics['mismatch_p95']:.3g}, largest {metrics['mismatch_max']:.3g})"
        )

    def _causes(self, metrics: Mapping[str, float], iteration: int) -> str:
        """Name the likely causes, the likeliest first, from the facts known of the run."""
        causes = []
        if metrics.get("mismatch_growth", 1.0) > _GROWING:
            causes.append(
                f"position factors (the difference is {metrics['mismatch_growth']:.1f} times as "
                "large at later positions: compare the rope settings of engine and trainer)"
            )
        if iteration > 0:
            causes.append(
                "stale weights or a stale prefix cache in the engine (if the iterations before "
                "were better)"
            )
        if self.temperature != 1.0:
            causes.append(
                f"temperature (rollout.temperature is {self.temperature:g}: the engine may report "
                "log-probs from before it was applied)"
            )
        if not self.float32:
            causes.append(_PRECISION)
        causes.append("a chat template or agent that changes tokens which were already played")
        if iteration == 0:
            causes.append("a model that the engine computes otherwise than transformers")
        return f"Likely: {'; '.join(causes)}."


def _of_probe(metrics: Mapping[str, float]) -> dict[str, float]:
    """The `mismatch_*` metrics of a probe, among others; nothing where there was none."""
    start = "probe_mismatch_"
    found = {name for name in metrics if name.startswith(start)}
    return {name.removeprefix("probe_"): metrics[name] for name in found}
