"""Microbatches of an update: packed one ahead of their use, and their loss.

A thread packs the next microbatch, the only copy of its tokens, while the current one computes, so
that packing hides behind computing. On a CUDA device it packs into pinned memory and copies on a
stream of its own; on the CPU the device's tensors are the packed arrays themselves. The result does
not depend on any of this: packing is a pure function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from earl_core.algorithms import importance
from earl_core.algorithms.aggregation import AGGREGATIONS
from earl_core.algorithms.kl import KL_ESTIMATORS
from earl_core.algorithms.objective import MicrobatchLoss, Objective
from earl_core.algorithms.policy_losses import POLICY_LOSSES, LossInputs
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
from earl_core.learner.lm_head import EntropyMode
from earl_core.learner.model import PackedTensors
from earl_core.learner.staging import SentBuffer, Staging
from earl_core.learner.target_masks import TargetMasks

if TYPE_CHECKING:
    from earl_core.learner.parallel.mesh import UpdateMesh

# Five int64 arrays and at most five float32 columns, and six int64 arrays of a context rank's
# part, none longer than the tokens; each may start up to 64 bytes late.
_BYTES_PER_TOKEN = 5 * 8 + 5 * 4
_BYTES_PER_TOKEN_SHARED_OUT = _BYTES_PER_TOKEN + 6 * 8
_SLACK_BYTES = 20 * 64


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
    they must ask for the same microbatches. state_widths: of the model (`recurrence`).
    """

    def __init__(
        self,
        device: torch.device,
        mesh: UpdateMesh | None = None,
        state_widths: Sequence[int] = (),
    ) -> None:
        self._device = device
        self._state_widths = tuple(state_widths)
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
        routed = np.arange if self._context is None else self._context.places
        allocate: Allocate = np.empty
        if staging is not None:
            tokens = sum(len(samples[row].tokens) for row in rows)
            per_token = _BYTES_PER_TOKEN if self._context is None else _BYTES_PER_TOKEN_SHARED_OUT
            size = tokens * per_token + _SLACK_BYTES
            if (routing := samples[rows[0]].routing) is not None:
                # Each of a rank's two stretches may be a token longer in a smaller pack.
                most = len(routed(tokens)) + 2
                size += most * routing.shape.token_bytes + 8 * tokens
            staging.begin(size)
            allocate = staging.allocate
        packed = pack(samples, rows, allocate, routed)
        share = None if self._context is None else share_of(packed, self._context, allocate)
        exchange = None if share is None else share.exchange
        # Copies from ordinary memory wait for their stream: on the computing one, for the current
        # microbatch.
        with nullcontext() if staging is None else staging.copying():
            boundaries = SampleBoundaries.from_tree(packed.tree, self._device, exchange)
            boundaries.plan_states(self._state_widths)
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
            routing=None if packed.routing is None else place(packed.routing),
            copies=None if mine.copies is None else place(mine.copies),
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

    of_values: ClassVar[bool] = False
    """True: the model says of each trained token a value in place of a log-prob."""

    stage: ClassVar[str] = "update"
    """The stage whose work it is."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self._objective = _objective(config)
        self._kl = config.kl
        self.balance = config.router_aux_loss_coef
        """Coefficient of the loss that balances experts (`router_balance`)."""
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
        if self.balance:
            needed["routing"] = (
                "the loss that balances experts counts recorded ones, so record them"
            )
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
