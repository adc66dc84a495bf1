"""The ranks of an update as the experts of a mixture see them.

Blocks of n data-parallel ranks that follow each other hold all experts, each rank others. Ranks at
the same place of their blocks hold the same experts: parts of them where the blocks share one copy
of the parameters (`shard`), and context ranks; copies of them where blocks are of other replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from earl_core.deployment.stage_deployment import EXPERT_AXES, StageDeployment

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

PARTS = ("expert_shard", "expert_context")
"""Ranks along these hold parts of the same experts."""


@dataclass(frozen=True, eq=False)
class ExpertMesh:
    """One rank's view.

    device_mesh: dimensions `EXPERT_AXES`. parts: of it, the ranks along `PARTS`, as one dimension
    "expert_parts".
    """

    device_mesh: DeviceMesh
    parts: DeviceMesh

    @property
    def ranks(self) -> DeviceMesh:
        """The ranks that hold different experts and exchange tokens, this one included."""
        return self.device_mesh["expert_parallel"]

    @property
    def coordinates(self) -> dict[str, int]:
        """Coordinates of this rank along each of `EXPERT_AXES`."""
        place = self.device_mesh.get_coordinate()
        assert place is not None
        return dict(zip(EXPERT_AXES, place, strict=True))

    def group(self, name: Literal["expert_parallel", "expert_copies"]) -> ProcessGroup | None:
        """The ranks with different experts, or with copies of the same; None: this one alone."""
        own = self.device_mesh[name]
        return own.get_group() if own.size() > 1 else None

    def parameter_mesh(self, *, copies: bool) -> DeviceMesh:
        """Mesh over which FSDP2 shards what a rank has of the experts: (copies,) parts."""
        from torch.distributed.device_mesh import DeviceMesh

        if copies and self.group("expert_copies") is not None:
            return DeviceMesh._concatenate([self.device_mesh["expert_copies"], self.parts])
        return self.parts


# As in `mesh`: groups are kept while the world is connected.
_CONNECTED: dict[tuple[int, ...], ExpertMesh] = {}


def expert_mesh(deployment: StageDeployment, device_type: str) -> ExpertMesh | None:
    """Make the mesh of a connected world's experts; None where they are not divided. Collective."""
    from torch.distributed.device_mesh import DeviceMesh

    if deployment.expert_parallel == 1:
        return None
    copies, shard, context, degree = sizes = deployment.expert_axes
    if sizes not in _CONNECTED:
        # Ranks are numbered with context ranks last.
        numbers = np.arange(deployment.ranks).reshape(copies, shard, degree, context)
        mesh = DeviceMesh(device_type, numbers.swapaxes(2, 3).tolist(), mesh_dim_names=EXPERT_AXES)
        _CONNECTED[sizes] = ExpertMesh(mesh, mesh[PARTS]._flatten("expert_parts"))
    return _CONNECTED[sizes]


def forget_experts() -> None:
    """Keep no groups of a world that is left."""
    _CONNECTED.clear()
