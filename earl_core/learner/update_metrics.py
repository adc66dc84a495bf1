"""What one update reports, gathered microbatch by microbatch."""

from __future__ import annotations

import numpy as np
import torch

from earl_core.algorithms.importance import mismatch_metrics
from earl_core.learner.attention import SampleBoundaries
from earl_core.learner.packing import PackedMicrobatch


class UpdateMetrics:
    """Accumulates tensors and turns them into numbers at the end, so that no step waits for one."""

    def __init__(self, learning_rate: float) -> None:
        self._learning_rate = learning_rate
        self._sums: dict[str, torch.Tensor] = {}
        self._norms: list[float] = []
        self._log_ratio_max: list[torch.Tensor] = []
        self._mismatch: list[tuple[torch.Tensor, np.ndarray]] = []
        self._weights: list[torch.Tensor] = []
        self._seconds = 0.0
        self._tokens = 0
        self._computed = 0
        self._padded = 0
        self._trained = 0
        self._samples = 0
        self._microbatches = 0

    def microbatch(
        self,
        packed: PackedMicrobatch,
        *,
        loss: torch.Tensor,
        parts: dict[str, torch.Tensor],
        log_ratio: torch.Tensor,
        old_logprobs: torch.Tensor | None,
        importance_weights: torch.Tensor | None,
        boundaries: SampleBoundaries,
    ) -> None:
        """Add a microbatch: `loss` and `parts` are additive over a minibatch; others [T'].

        old_logprobs: given when they are to be compared with the engine's.
        """
        for name, value in {"loss": loss, **parts}.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.double()
        self._log_ratio_max.append(log_ratio.max())
        if old_logprobs is not None:
            # Copied, because the feed uses the microbatch's memory again, and because a view keeps
            # all of a microbatch alive on the device.
            engine = packed.columns["rollout_logprobs"].copy()
            self._mismatch.append((old_logprobs.clone(), engine))
            if importance_weights is not None:
                self._weights.append(importance_weights)
        self._tokens += sum(packed.lengths)
        self._computed += packed.tokens.size
        self._padded += boundaries.padded_tokens
        self._trained += packed.targets.size
        self._samples += len(packed.rows)
        self._microbatches += 1

    def step(self, grad_norm: float, seconds: float) -> None:
        """Close a minibatch: its gradient norm before clipping, and its duration."""
        self._norms.append(grad_norm)
        self._seconds += seconds

    def summary(self) -> dict[str, float]:
        """Means over the optimizer steps; counts and rates over the whole update."""
        steps = len(self._norms)
        metrics = {name: float(value) / max(1, steps) for name, value in self._sums.items()}
        if "ratio" in metrics:
            metrics["ratio_mean"] = metrics.pop("ratio")
        if self._log_ratio_max:
            metrics["ratio_max"] = float(torch.stack(self._log_ratio_max).max().exp())
        if self._weights:
            metrics["importance_weight_mean"] = float(torch.cat(self._weights).mean())
        if self._mismatch:
            trainer = torch.cat([pair[0] for pair in self._mismatch])
            engine = np.concatenate([pair[1] for pair in self._mismatch])
            metrics |= mismatch_metrics(trainer, engine)
        return metrics | {
            "grad_norm": float(np.mean(self._norms)) if steps else 0.0,
            "learning_rate": self._learning_rate,
            "optimizer_steps": float(steps),
            "microbatches": float(self._microbatches),
            "tokens": float(self._tokens),
            "tokens_trained": float(self._trained),
            "tokens_per_second": self._tokens / self._seconds if self._seconds else 0.0,
            "shared_prefix_share": 1.0 - self._computed / self._tokens if self._tokens else 0.0,
            "padding_share": 1.0 - self._computed / self._padded if self._padded else 0.0,
            "update_seconds": self._seconds,
        }
