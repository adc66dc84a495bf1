"""Rows of a tensor given to several users, whose gradients are summed in float32, in a fixed order.

Autograd sums them in their own dtype, on a GPU in the order in which its threads come: in bf16 the
sum of many copies is off by several roundings, and differs from run to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Rows:
    """The tokens of a pack that a call takes: `count` that follow `start`, or those at `places`.
    places: int64 [count]; None where the tokens lie in order."""

    start: int
    count: int
    places: torch.Tensor | None = None

    @classmethod
    def at(cls, places: np.ndarray, device: torch.device | str = "cpu") -> Rows:
        """The tokens at these places, int64, at least one; copied to the device unless in order."""
        first, count = int(places[0]), places.size
        if np.array_equal(places, np.arange(first, first + count)):
            return cls(first, count)
        return cls(first, count, torch.from_numpy(places).to(device))

    def of(self, states: torch.Tensor) -> torch.Tensor:
        """The states of these tokens, [count, ...], of [tokens, ...]."""
        if self.places is not None:
            return states.index_select(0, self.places)
        return states.narrow(0, self.start, self.count)


def sum_rows(rows: torch.Tensor, places: torch.Tensor, count: int) -> torch.Tensor:
    """Add up rows [n, ...] at their places, int64 [n], among `count`: float32 [count, ...]. Sorted
    by place on a GPU and one after another on a CPU, so that equal rows give equal sums."""
    # torch's own sum for embeddings; in 16 bits it would round in between.
    flat = rows.float().flatten(1)
    summed: torch.Tensor = torch.ops.aten.embedding_dense_backward(flat, places, count, -1, False)
    return summed.view(count, *rows.shape[1:])


def deal(states: torch.Tensor, users: Sequence[Rows]) -> tuple[torch.Tensor, ...]:
    """Give each user its rows of the states [tokens, ...]; a token may go to several, or several
    times to one."""
    if len(users) == 1 and users[0].places is None:
        # The gradient of a part is a copy, that of the whole is not.
        whole = users[0].count == len(states)
        return (states if whole else users[0].of(states),)
    dealt: tuple[torch.Tensor, ...] = _Deal.apply(states, tuple(users))  # type: ignore[no-untyped-call]
    return dealt


class _Deal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, users: tuple[Rows, ...]
    ) -> tuple[torch.Tensor, ...]:
        ctx.users, ctx.shape, ctx.dtype = users, states.shape, states.dtype
        return tuple(rows.of(states) for rows in users)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        pairs = list(zip(ctx.users, gradients, strict=True))
        copied = [(rows.places, each) for rows, each in pairs if rows.places is not None]
        if copied:
            places, copies = (torch.cat(parts) for parts in zip(*copied, strict=True))
            total = sum_rows(copies, places, ctx.shape[0])
        else:
            total = gradients[0].new_zeros(ctx.shape, dtype=torch.float32)
        for rows, each in pairs:
            if rows.places is None:
                total.narrow(0, rows.start, rows.count).add_(each)
        return total.to(ctx.dtype), None
