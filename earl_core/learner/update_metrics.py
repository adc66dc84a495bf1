"""What an update reports: sums of its microbatches, engine against trainer, experts."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import torch

from earl_core.algorithms import importance
from earl_core.algorithms.policy_losses import CLIPPED
from earl_core.learner.data.packing import PackedMicrobatch
from earl_core.learner.data.zero_advantage import Skipped
from earl_core.learner.microbatches import Evaluated, FedMicrobatch
from earl_core.learner.routing_tally import RoutingTally
from earl_core.tensors.collectives import Ranks


class UpdateMetrics:
    """Accumulates tensors and turns them into numbers at the end, so that no step waits for one."""

    def __init__(self, learning_rate: float, routing: RoutingTally) -> None:
        self._learning_rate = learning_rate
        self._sums: dict[str, torch.Tensor] = {}
        self._norms: list[float] = []
        self._measured = 0  # steps that had something to measure
        self._log_ratio_max: list[torch.Tensor] = []
        self._pairs: list[tuple[torch.Tensor, np.ndarray]] = []
        self._compared: list[np.ndarray] = []
        self._seconds = 0.0
        self._counts: Counter[str] = Counter()
        self.routing = routing

    def microbatch(self, fed: FedMicrobatch, evaluated: Evaluated, *, compared: bool) -> None:
        """Add a microbatch. compared: whether the trainer's log-probs are to be compared with the
        engine's."""
        result = evaluated.result
        for name, value in {"loss": result.loss.detach(), **result.metrics}.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.double()
        if evaluated.log_ratio is not None:
            self._log_ratio_max.append(evaluated.log_ratio.max())
        packed = fed.packed
        if compared:
            # Copied, because the feed uses the microbatch's memory again, and because a view keeps
            # all of a microbatch alive on the device.
            self._pairs.append((evaluated.old_logprobs.clone(), _engine_side(packed)))
        self._counts.update(
            tokens=sum(packed.lengths),
            packed=packed.tokens.size,  # after sharing prefixes
            own=fed.tensors.tokens.numel(),  # of these on this rank
            padded=fed.tensors.boundaries.padded_tokens,  # what its attention computes
            trained=packed.targets.size,
            microbatches=1,
        )

    def compare(self, ranks: Ranks) -> dict[str, float]:
        """Engine against trainer, over the trained tokens of all ranks since the last call that the
        policy before this update has sampled; nothing without such tokens. Collective.
        """
        parts = [
            np.concatenate([trainer.cpu().numpy()[:, None], engine], axis=1)
            for trainer, engine in self._pairs
        ]
        self._pairs.clear()
        own = np.concatenate([np.empty((0, 4), dtype=np.float32), *parts])
        table = np.concatenate(ranks.gather_rows(own))
        self._compared.append(table[table[:, 3] == 1.0])
        return importance.mismatch_metrics(*self._compared[-1].T[:3])

    def step(self, grad_norm: float, seconds: float, measured: bool) -> None:
        """Close a minibatch: its gradient norm before clipping, its duration, and whether a trained
        token of it was computed, on any rank."""
        self._norms.append(grad_norm)
        self._measured += measured
        self._seconds += seconds

    def summary(
        self, ranks: Ranks, peaks: dict[str, float], skipped: Skipped, epochs: int
    ) -> dict[str, float]:
        """Means over the optimizer steps; counts and rates over the whole update and all ranks.

        peaks: of this rank; the largest of all are in the result. skipped: samples of each of the
        epochs that are in the counts of tokens and in no rate. Collective.
        """
        steps = len(self._norms)
        every = ranks.gather_json(self._own() | {"peaks": peaks})
        metrics = {
            name: total / max(1, steps if _is_of_all(name) else self._measured)
            for name, total in _added(every, "sums").items()
        }
        if {name for name in metrics if name.startswith("loss/")} == {"loss/policy"}:
            del metrics["loss/policy"]  # the loss has no other part
        if "ratio" in metrics:
            metrics["ratio_mean"] = metrics.pop("ratio")
        # numpy's: a NaN stays one.
        largest = np.max([each["log_ratio_max"] for each in every])
        if largest != -math.inf:
            metrics["ratio_max"] = float(np.exp(np.float32(largest)))
        if self._compared:
            metrics |= importance.mismatch_metrics(*np.concatenate(self._compared).T[:3])
        metrics |= self.routing.metrics(steps)
        counts = _added(every, "counts")
        tokens, seconds = counts["tokens"], max(each["seconds"] for each in every)
        out = epochs * skipped.tokens
        return (
            metrics
            | {
                "grad_norm": float(np.mean(self._norms)) if steps else 0.0,
                "learning_rate": self._learning_rate,
                "optimizer_steps": float(steps),
                "microbatches": float(counts["microbatches"]),
                "tokens": float(tokens + out),
                "tokens_trained": float(counts["trained"] + epochs * skipped.trained),
                "skipped_tokens_share": out / (tokens + out) if out else 0.0,
                "tokens_per_second": tokens / seconds if seconds else 0.0,
                "shared_prefix_share": 1.0 - counts["packed"] / tokens if tokens else 0.0,
                "padding_share": 1.0 - counts["own"] / counts["padded"] if tokens else 0.0,
                "update_seconds": seconds,
            }
            | {name: max(each["peaks"][name] for each in every) for name in peaks}
        )

    def _own(self) -> dict[str, Any]:
        return {
            "sums": {name: float(value) for name, value in self._sums.items()},
            "log_ratio_max": float(np.max([-math.inf, *map(float, self._log_ratio_max)])),
            "counts": dict(self._counts),
            "seconds": self._seconds,
        }


def _added(every: list[dict[str, Any]], key: str) -> Counter[str]:
    """The sums over the ranks of the numbers under `key`; a rank may lack some."""
    total: Counter[str] = Counter()
    for each in every:
        total.update(each[key])
    return total


def _is_of_all(name: str) -> bool:
    """Tell whether skipped samples are in a mean, with 0, as they are in the loss."""
    return name in CLIPPED or name.partition("/")[0] == "loss"


def _engine_side(packed: PackedMicrobatch) -> np.ndarray:
    """Return the engine's side of a comparison, float32 [T', 3]: log-prob, position, and 1 where
    the token is the current policy's."""
    engine = packed.columns["rollout_logprobs"]
    current = packed.columns.get("current", np.ones_like(engine))
    return np.stack([engine, packed.position_ids[packed.predictors], current], axis=1).astype(
        np.float32
    )
