"""Parameters that are cut over ranks: DTensors, of which a rank computes with its own part."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def cut(parameter: torch.Tensor, ranks: DeviceMesh, dimension: int) -> nn.Parameter:
    """Cut a whole parameter over the one-dimensional mesh, without communication: every rank has
    the same, or all are on the meta device."""
    part = distribute_tensor(parameter.detach(), ranks, [Shard(dimension)], src_data_rank=None)
    if not part.is_meta:
        # The part is a view until here and would keep the whole tensor alive.
        part._local_tensor = part._local_tensor.clone()
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


def own_part(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a cut parameter, with the way back of its gradient."""
    return cast(DTensor, parameter).to_local()
