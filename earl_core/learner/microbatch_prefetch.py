"""Feed: microbatches packed one ahead of their use, so that packing hides behind computing.

A thread packs the next microbatch, the only copy of its tokens, while the current one computes.
On a CUDA device it packs into pinned memory and copies on a stream of its own; on the CPU the
device's tensors are the packed arrays themselves. What comes out does not depend on any of this:
packing is a pure function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from earl_core.learner.attention.attention_plan import SampleBoundaries
from earl_core.learner.attention.context_parallel import (
    ContextGroup,
    PackShare,
    TrainedGather,
    share_of,
)
from earl_core.learner.data.packing import Allocate, PackedMicrobatch, TrainingSample, pack
from earl_core.learner.model import PackedTensors
from earl_core.learner.staging import SentBuffer, Staging

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

        Raises what packing raises, where the microbatch's turn comes.
        """
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
        )
        context = None
        if share is not None:
            context = TrainedGather(
                share.exchange.place, place(share.trained), place(share.order), share.most
            )
        columns = {name: place(column) for name, column in packed.columns.items()}
        return FedMicrobatch(packed, tensors, place(packed.episode_index), columns, context)
