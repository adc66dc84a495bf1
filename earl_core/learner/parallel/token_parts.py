"""The tokens of a pack among tensor-parallel ranks, and how parts become a whole and sums parts.

Each rank has as many tokens as any other, because a compiled layer takes one number as a symbol,
not one for each rank: packs are lengthened to a multiple of the ranks. The collectives are torch's
functional ones, which a compiled layer holds as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class TokenParts:
    """Parts of a pack's T tokens: each of n ranks has P in a row, those of rank r from r P.

    ranks: n. rank: this one. group: name of the process group.
    """

    ranks: int
    rank: int
    group: str

    @classmethod
    def of(cls, mesh: DeviceMesh) -> TokenParts:
        """Make the parts of the ranks of a one-dimensional mesh."""
        return cls(mesh.size(), mesh.get_local_rank(), mesh.get_group().group_name)

    def missing(self, tokens: int) -> int:
        """n P - T, where P is at least two: torch.compile takes one for another kind of layer."""
        return max(-tokens % self.ranks, 2 * self.ranks - tokens)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """This rank's [1, P, hidden] → [1, n P, hidden]; the gradient is the sum over the ranks."""
        return _applied(_Gather, part, self)

    def gather_for_equals(self, part: torch.Tensor) -> torch.Tensor:
        """`gather` for what all ranks compute alike, so that their gradients are one."""
        return _applied(_GatherForEquals, part, self)

    def sum(self, summand: torch.Tensor) -> torch.Tensor:
        """Add up the ranks' [1, n P, hidden] → this rank's [1, P, hidden] of it."""
        return _applied(_Sum, summand, self)


def _applied(
    function: type[torch.autograd.Function], states: torch.Tensor, parts: TokenParts
) -> torch.Tensor:
    found = function.apply(states, parts.ranks, parts.rank, parts.group)  # type: ignore[no-untyped-call]
    return cast(torch.Tensor, found)


def _gathered(part: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    ops = torch.ops._c10d_functional
    rows = ops.wait_tensor(ops.all_gather_into_tensor(part.contiguous(), ranks, group))
    return cast(torch.Tensor, rows.view(1, -1, part.shape[2]))


def _summed(summand: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    ops = torch.ops._c10d_functional
    rows = summand.reshape(ranks, -1, summand.shape[2])
    # No view, because a compiled layer is compiled again for its input where another's was none.
    part = ops.reduce_scatter_tensor(rows.contiguous(), "sum", ranks, group)
    return cast(torch.Tensor, ops.wait_tensor(part))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, ranks: int, rank: int, group: str) -> torch.Tensor:
        ctx.ranks, ctx.group = ranks, group
        return _gathered(part, ranks, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _summed(gradients[0], ctx.ranks, ctx.group), None, None, None


class _GatherForEquals(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, ranks: int, rank: int, group: str) -> torch.Tensor:
        ctx.rank, ctx.size = rank, part.shape[1]
        return _gathered(part, ranks, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return gradients[0].narrow(1, ctx.rank * ctx.size, ctx.size), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summand: torch.Tensor, ranks: int, rank: int, group: str) -> torch.Tensor:
        ctx.ranks, ctx.group = ranks, group
        return _summed(summand, ranks, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _gathered(gradients[0], ctx.ranks, ctx.group), None, None, None
