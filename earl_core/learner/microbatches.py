"""Microbatches of an update: packed one ahead of their use, their loss, and what they report.

A thread packs the next microbatch, the only copy of its tokens, while the current one computes, so
that packing hides behind computing. On a CUDA device it packs into pinned memory and copies on a
stream of its own; on the CPU the device's tensors are the packed arrays themselves. The result does
not depend on any of this: packing is a pure function.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from earl_core.algorithms import importance
from earl_core.algorithms.aggregation import AGGREGATIONS
from earl_core.algorithms.kl import KL_ESTIMATORS
from earl_core.algorithms.objective import MicrobatchLoss, Objective
from earl_core.algorithms.policy_losses import CLIPPED, POLICY_LOSSES, LossInputs
from earl_core.config.algorithm import AlgorithmConfig
from earl_core.learner.attention.attention_plan import SampleBoundaries
from earl_core.learner.attention.context_parallel import (
    ContextGroup,
    PackShare,
    TrainedGather,
    share_of,
)
from earl_core.learner.data.packing import Allocate, PackedMicrobatch, TrainingSample, pack
from earl_core.learner.data.samples import Minibatch
from earl_core.learner.data.zero_advantage import Skipped
from earl_core.learner.lm_head import EntropyMode
from earl_core.learner.model import PackedTensors
from earl_core.learner.staging import SentBuffer, Staging
from earl_core.learner.target_masks import TargetMasks
from earl_core.tensors.collectives import Ranks

if TYPE_CHECKING:
    from earl_core.learner.parallel.mesh import UpdateMesh

# Five int64 arrays and at most five float32 columns, and six int64 arrays of a context rank's
# part, none longer than the tokens; each may start up to 64 bytes late.
_BYTES_PER_TOKEN = 5 * 8 + 5 * 4
_BYTES_PER_TOKEN_SHARED_OUT = _BYTES_PER_TOKEN + 6 * 8
_SLACK_BYTES = 16 * 64


@dataclass(frozen=True)
class FedMicrobatch:
    """A packed microbatch and its arrays on the device.

    packed: the whole microbatch, on the host; its arrays are overwritten once the microbatch after
    the next is asked for. tensors: what the model needs: with context parallelism this rank's
    tokens, and of the trained tokens those that it predicts. context: how these come together
    again (`gather_trained`); None where they are all here. episode_index int64 [T'] and columns
    float32 [T']: of the whole microbatch, as in `packed`.
    """

    packed: PackedMicrobatch
    tensors: PackedTensors
    episode_index: torch.Tensor
    columns: dict[str, torch.Tensor]
    context: TrainedGather | None = None


class Feed:
    """Gives the microbatches of a plan in order, on `device`. One iteration at a time.

    mesh: where its context dimension has several ranks, each gets its part of every microbatch;
    they must ask for the same microbatches.
    """

    def __init__(self, device: torch.device, mesh: UpdateMesh | None = None) -> None:
        self._device = device
        self._context = ContextGroup.of(mesh)
        self._stagings: tuple[Staging, ...] = ()
        if device.type == "cuda":
            # Two buffers: one is packed while the host arrays of the other are in use.
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stagings = (Staging(device, stream), Staging(device, stream))

    def microbatches(
        self, samples: Sequence[TrainingSample], plan: Sequence[Sequence[int]]
    ) -> Iterator[FedMicrobatch]:
        """Each microbatch of the plan (row indices into `samples`), the next one being prepared.
        Raises what packing raises, where the microbatch's turn comes."""
        if not plan:
            return
        with ThreadPoolExecutor(1, thread_name_prefix="feed") as thread:
            coming = thread.submit(self._prepare, samples, plan[0], 0)
            for number, rows in enumerate(plan[1:], start=1):
                deliver = coming.result()
                coming = thread.submit(self._prepare, samples, rows, number)
                yield deliver()
                del deliver
            yield coming.result()()

    def _prepare(
        self, samples: Sequence[TrainingSample], rows: Sequence[int], number: int
    ) -> Callable[[], FedMicrobatch]:
        """Pack a microbatch and send it; the rest is done by whoever computes."""
        staging = self._stagings[number % 2] if self._stagings else None
        allocate: Allocate = np.empty
        if staging is not None:
            tokens = sum(len(samples[row].tokens) for row in rows)
            per_token = _BYTES_PER_TOKEN if self._context is None else _BYTES_PER_TOKEN_SHARED_OUT
            staging.begin(tokens * per_token + _SLACK_BYTES)
            allocate = staging.allocate
        packed = pack(samples, rows, allocate)
        share = None if self._context is None else share_of(packed, self._context, allocate)
        exchange = None if share is None else share.exchange
        # Copies from ordinary memory wait for their stream: on the computing one, for the current
        # microbatch.
        with nullcontext() if staging is None else staging.copying():
            boundaries = SampleBoundaries.from_tree(packed.tree, self._device, exchange)
        sent = None if staging is None else staging.send()
        return partial(self._deliver, packed, share, boundaries, sent)

    def _deliver(
        self,
        packed: PackedMicrobatch,
        share: PackShare | None,
        boundaries: SampleBoundaries,
        sent: SentBuffer | None,
    ) -> FedMicrobatch:
        if sent is not None:
            sent.receive(boundaries.tensors())

        def place(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array) if sent is None else sent.tensor(array)

        mine = packed if share is None else share
        tensors = PackedTensors(
            tokens=place(mine.tokens),
            position_ids=place(mine.position_ids),
            boundaries=boundaries,
            predictors=place(mine.predictors),
            targets=place(mine.targets),
            masks=TargetMasks.of(mine.masks, self._device),
        )
        context = None
        if share is not None:
            context = TrainedGather(
                share.exchange.place, place(share.trained), place(share.order), share.most
            )
        columns = {name: place(column) for name, column in packed.columns.items()}
        return FedMicrobatch(packed, tensors, place(packed.episode_index), columns, context)


@dataclass(frozen=True)
class Evaluated:
    """A microbatch's loss and what went into it: log-probs before the first step, float32 [T'].
    log_ratio: of the policy to the one that the loss's ratios are to, [T'], if it matters.
    """

    result: MicrobatchLoss
    old_logprobs: torch.Tensor
    log_ratio: torch.Tensor | None


class Algorithm:
    """The objective of an update. Raises ConfigError for an unknown name."""

    supervised: ClassVar[bool] = False
    """True: it learns from tokens that no policy of this run has sampled."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self._objective = _objective(config)
        self._kl = config.kl
        self._from_rollout, weighing = config.from_rollout, config.weighing
        self._correction = None
        if weighing is not None:
            self._correction = importance.ImportanceCorrection(**weighing)

    @property
    def whole_episodes(self) -> bool:
        """True when all samples of an episode must be in one microbatch. An aggregation never needs
        that: its weights depend on counts of the whole minibatch."""
        corrects = self._correction is None or self._correction.token_wise
        return not (self._objective.policy_loss.token_wise and corrects)

    @property
    def entropy_mode(self) -> EntropyMode:
        """Use that `evaluate` makes of entropies: it reports them, or learns from them."""
        return "differentiable" if self._objective.entropy_coefficient > 0 else "detached"

    def comparable(self, step: int) -> bool:
        """True when a step of the first epoch knows the log-probs of the policy before the update,
        to compare them with the engine's."""
        return not self.supervised and (step == 0 or not self._from_rollout)

    def check_columns(self, samples: Sequence[TrainingSample], steps: int) -> None:
        """Raise ValueError when an update of so many steps needs a column that is missing."""
        needed = {"advantages": "run the advantage stage first"}
        if self._objective.kl is not None:
            needed["reference_logprobs"] = "run the reference stage first"
        if self._correction is not None or (steps > 1 and not self._from_rollout):
            needed["old_logprobs"] = "fill it with `score` before the update"
        for sample in samples:
            for name, advice in needed.items():
                if getattr(sample, name) is None:
                    raise ValueError(f"Sample {sample.sample_id} has no {name}: {advice}.")

    def evaluate(
        self,
        fed: FedMicrobatch,
        logprobs: torch.Tensor,
        entropy: torch.Tensor | None,
        minibatch: Minibatch,
    ) -> Evaluated:
        """The loss of the microbatch's trained tokens [T'], as a part of the minibatch's."""
        columns, index = fed.columns, fed.episode_index
        # Without old log-probs there is a single step, so the policy before it is this one; or the
        # loss goes by the engine's, and only the first step's policy is compared with that.
        before = columns.get("old_logprobs", logprobs.detach())
        old = columns["rollout_logprobs"] if self._from_rollout else before
        episodes = fed.packed.episode_ids.tolist()
        weights = None
        if self._correction is not None:
            weights = self._correction.weights(
                old, columns["rollout_logprobs"], index, len(episodes)
            )
        counts = np.array([minibatch.token_counts[episode] for episode in episodes])
        result = self._objective.microbatch(
            LossInputs(
                *(logprobs, old, columns["advantages"], index, len(episodes)),
                importance_weights=weights,
                rollout_logprobs=columns["rollout_logprobs"],
            ),
            torch.from_numpy(counts).to(logprobs.device, non_blocking=True),
            minibatch.totals,
            reference_logprobs=columns.get("reference_logprobs"),
            kl_coefficient=columns.get("kl_coefficient", self._kl.at(minibatch.iteration)),
            entropy=entropy,
        )
        return Evaluated(result, before, logprobs.detach() - old)


def _objective(algorithm: AlgorithmConfig) -> Objective:
    in_loss = algorithm.kl.placement == "loss"
    return Objective(
        policy_loss=POLICY_LOSSES.build(algorithm.policy_loss),
        aggregation=AGGREGATIONS.build(algorithm.aggregation),
        kl=KL_ESTIMATORS.build(algorithm.kl.estimator) if in_loss else None,
        kl_coefficient=algorithm.kl.coefficient if in_loss else 0.0,
        entropy_coefficient=algorithm.entropy_coefficient,
    )


class UpdateMetrics:
    """Accumulates tensors and turns them into numbers at the end, so that no step waits for one."""

    def __init__(self, learning_rate: float) -> None:
        self._learning_rate = learning_rate
        self._sums: dict[str, torch.Tensor] = {}
        self._norms: list[float] = []
        self._measured = 0  # steps that had something to measure
        self._log_ratio_max: list[torch.Tensor] = []
        self._pairs: list[tuple[torch.Tensor, np.ndarray]] = []
        self._compared: list[np.ndarray] = []
        self._seconds = 0.0
        self._counts: Counter[str] = Counter()

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
