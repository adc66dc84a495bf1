"""Feed: microbatches packed one ahead of their use, so that packing hides behind computing.

A thread packs the next microbatch, the only copy of its tokens, while the current one computes.
On a CUDA device it packs into pinned memory and copies on a stream of its own; on the CPU the
device's tensors are the packed arrays themselves. What comes out does not depend on any of this:
packing is a pure function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from earl_core.learner.attention import SampleBoundaries
from earl_core.learner.model import PackedTensors
from earl_core.learner.packing import PackedMicrobatch, TrainingSample, pack
from earl_core.learner.staging import SentBuffer, Staging

# Five int64 arrays and at most four float32 columns, none longer than the tokens; each may start
# up to 64 bytes late.
_BYTES_PER_TOKEN = 5 * 8 + 4 * 4
_SLACK_BYTES = 9 * 64


@dataclass(frozen=True)
class FedMicrobatch:
    """A packed microbatch and its arrays on the device.

    packed: on the host; its arrays are overwritten once the microbatch after the next is asked
    for. tensors: what the model needs. episode_index int64 [T'] and columns float32 [T']: as in
    `packed`.
    """

    packed: PackedMicrobatch
    tensors: PackedTensors
    episode_index: torch.Tensor
    columns: dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Prepared:
    packed: PackedMicrobatch
    sent: SentBuffer | None


class Feed:
    """Gives the microbatches of a plan in order, on `device`. One iteration at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
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
            coming: Future[_Prepared] = thread.submit(self._prepare, samples, plan[0], 0)
            for number, rows in enumerate(plan[1:], start=1):
                ready = coming.result()
                coming = thread.submit(self._prepare, samples, rows, number)
                yield self._deliver(ready)
                del ready
            yield self._deliver(coming.result())

    def _prepare(
        self, samples: Sequence[TrainingSample], rows: Sequence[int], number: int
    ) -> _Prepared:
        if not self._stagings:
            return _Prepared(pack(samples, rows), None)
        staging = self._stagings[number % 2]
        tokens = sum(len(samples[row].tokens) for row in rows)
        staging.begin(tokens * _BYTES_PER_TOKEN + _SLACK_BYTES)
        packed = pack(samples, rows, staging.allocate)
        return _Prepared(packed, staging.send())

    def _deliver(self, ready: _Prepared) -> FedMicrobatch:
        packed, sent = ready.packed, ready.sent
        if sent is not None:
            sent.receive()

        def place(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array) if sent is None else sent.tensor(array)

        tensors = PackedTensors(
            tokens=place(packed.tokens),
            position_ids=place(packed.position_ids),
            boundaries=SampleBoundaries.from_tree(packed.tree, self._device),
            predictors=place(packed.predictors),
            targets=place(packed.targets),
        )
        columns = {name: place(column) for name, column in packed.columns.items()}
        return FedMicrobatch(packed, tensors, place(packed.episode_index), columns)
