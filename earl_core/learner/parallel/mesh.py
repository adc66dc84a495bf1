"""The device mesh of an update: how ranks are numbered, and the process groups of one rank.

A rank's number is `(data * context + context_rank) * tensor + tensor_rank` with `data =
replicate_rank * shard + shard_rank`: the numbering of `earl_core.dispatch.reads.plan.Layout`.
Ranks of one data rank form a replica: they see the same samples. accelerate owns the process
state: devices, launch variables, the connection to the other ranks. This module imports no torch
until a mesh is made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import TYPE_CHECKING

from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.system.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from earl_core.tensors.collectives import GroupName

# Groups over several dimensions of the mesh. Context ranks hold parts of the parameters like shard
# ranks do, because the gradients of both are sums over tokens.
COMBINED: dict[str, tuple[str, ...]] = {
    "data": ("replicate", "shard"),
    "parameters": ("shard", "context"),
    "replica": ("context", "tensor"),
    "world": ("replicate", "shard", "context", "tensor"),
}


_WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


@dataclass(frozen=True)
class MeshShape:
    """Ranks in each dimension: copies of the model, parts of each copy (FSDP2), parts of each
    pack's tokens, parts of each matrix. Raises ValueError below 1.
    """

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for dimension in fields(self):
            if getattr(self, dimension.name) < 1:
                raise ValueError(f"A mesh's {dimension.name} must be at least 1: {self}.")

    @classmethod
    def of(cls, deployment: StageDeployment) -> MeshShape:
        """The mesh of a stage's ranks."""
        return cls(
            replicate=deployment.replicas,
            shard=deployment.shard,
            context=deployment.context_parallel,
            tensor=deployment.tensor_parallel,
        )

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """In the order of rank numbers, the fastest last."""
        return self.replicate, self.shard, self.context, self.tensor

    @property
    def size(self) -> int:
        """All ranks."""
        return math.prod(self.sizes)

    @property
    def data(self) -> int:
        """Ranks that see different samples."""
        return self.replicate * self.shard

    def coordinates(self, rank: int) -> tuple[int, int, int, int]:
        """(replicate, shard, context, tensor) of a rank. Raises IndexError outside the mesh."""
        if not 0 <= rank < self.size:
            raise IndexError(f"Rank {rank} is not in a mesh of {self.size} ranks: {self}.")
        places = []
        for size in reversed(self.sizes):
            rank, place = divmod(rank, size)
            places.append(place)
        return places[3], places[2], places[1], places[0]


DIMENSIONS = tuple(dimension.name for dimension in fields(MeshShape))


@dataclass(eq=False)
class UpdateMesh:
    """What one rank knows of the mesh it is in.

    device_mesh: dimensions `DIMENSIONS`; None for a single rank, which has no process group.
    """

    shape: MeshShape
    rank: int
    device: torch.device
    device_mesh: DeviceMesh | None = None
    _meshes: dict[str, DeviceMesh] = field(default_factory=dict)
    _groups: dict[str, ProcessGroup] = field(default_factory=dict)

    @property
    def coordinates(self) -> tuple[int, int, int, int]:
        """(replicate, shard, context, tensor) of this rank."""
        return self.shape.coordinates(self.rank)

    @property
    def data_rank(self) -> int:
        """Which replica this rank is in."""
        return self.coordinates[0] * self.shape.shard + self.coordinates[1]

    @property
    def context_rank(self) -> int:
        """Which part of each pack's tokens this rank computes."""
        return self.coordinates[2]

    @property
    def tensor_rank(self) -> int:
        """Which part of each matrix this rank holds."""
        return self.coordinates[3]

    @property
    def leader(self) -> bool:
        """Whether this rank speaks for its replica."""
        return self.context_rank == 0 and self.tensor_rank == 0

    def group(self, name: GroupName) -> ProcessGroup | None:
        """The ranks that differ from this one only in the named dimensions; None if it is alone.

        "data": replicate x shard. "parameters": shard x context, which hold the parts of one copy.
        "replica": context x tensor.
        """
        return self._groups.get(name)

    def submesh(self, name: GroupName) -> DeviceMesh:
        """The one-dimensional device mesh of a group with several ranks."""
        return self._meshes[name]

    @property
    def parameter_mesh(self) -> DeviceMesh:
        """What FSDP2 shards parameters over, (copies of them,) parts; needs several parts."""
        from torch.distributed.device_mesh import DeviceMesh

        parts = self._meshes["parameters"]
        copies = self._meshes.get("replicate")
        return parts if copies is None else DeviceMesh._concatenate([copies, parts])

    def close(self) -> None:
        """Use this mesh no more. Its groups stay for the next mesh of its shape."""
        self.device_mesh = None
        self._groups, self._meshes = {}, {}

    def _connect(self) -> None:
        """Make all groups, in one order on all ranks."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(self.device.type, self.shape.sizes, mesh_dim_names=DIMENSIONS)
        self.device_mesh = mesh
        sizes = dict(zip(DIMENSIONS, self.shape.sizes, strict=True))
        self._meshes = {name: mesh[name] for name, size in sizes.items() if size > 1}
        for name, parts in COMBINED.items():
            several = [part for part in parts if sizes[part] > 1]
            if len(several) == 1:
                self._meshes[name] = self._meshes[several[0]]
            elif several and name != "world":
                self._meshes[name] = mesh[parts]._flatten(name)
        groups = {name: each.get_group() for name, each in self._meshes.items()}
        world = dist.group.WORLD
        assert world is not None
        self._groups = {**groups, "world": world}


# Groups are kept while the world is connected: DTensor remembers how it moved tensors on a mesh and
# takes those groups again on an equal one.
_CONNECTED: dict[MeshShape, UpdateMesh] = {}


def create_mesh(shape: MeshShape | None = None, *, timeout_seconds: float = 1800.0) -> UpdateMesh:
    """Connect this process, as launched, with the other ranks of the mesh.

    Reads RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; gloo on the CPU, NCCL on CUDA
    (with gloo for what lies in the host's memory). All ranks call it alike; a
    connected process may call it again for another mesh of the same size. A mesh of one rank
    connects to nobody, whatever the variables say. timeout_seconds: after that long a collective
    that others have left waiting fails.

    Raises ConfigError when the number of ranks launched is not the mesh's.
    """
    shape = shape or MeshShape()
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if shape.size > 1 and shape.size != launched:
        raise ConfigError(
            f"The mesh {shape} has {shape.size} ranks, but {launched} were launched: change the "
            "update's layout or the number of ranks."
        )
    device, rank = _process_state(shape.size, timeout_seconds)
    mesh = UpdateMesh(shape, rank, device)
    if shape.size > 1:
        known = _CONNECTED.get(shape)
        if known is None:
            mesh._connect()
            _CONNECTED[shape] = dataclasses.replace(mesh)
        else:
            mesh = dataclasses.replace(known)
    return mesh


def leave_world() -> None:
    """Disconnect this process from all others, if it is connected; for good: see `_CONNECTED`."""
    import torch.distributed as dist
    from accelerate.state import AcceleratorState

    if dist.is_available() and dist.is_initialized():
        _CONNECTED.clear()
        dist.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)


def _process_state(ranks: int, timeout_seconds: float) -> tuple[torch.device, int]:
    import torch
    import torch.distributed as dist
    from accelerate import PartialState
    from accelerate.state import AcceleratorState

    from earl_core.learner.parallel.world import join_world

    cuda = torch.cuda.is_available()
    if ranks == 1:
        # From these accelerate would conclude that there are other ranks to wait for.
        with _without("LOCAL_RANK", *_WORLD_SIZES):
            return torch.device(PartialState(cpu=not cuda).device), 0
    backend = "cuda:nccl,cpu:gloo" if cuda else "gloo"
    if not dist.is_initialized():
        # A mesh of one rank may have been made before, and accelerate keeps what it found then.
        AcceleratorState._reset_state(reset_partial_state=True)
        # accelerate takes a world that is there already; one of its own listens everywhere.
        join_world(backend, timedelta(seconds=timeout_seconds))
    with warnings.catch_warnings():
        # The learner sets its threads itself.
        warnings.filterwarnings("ignore", message="OMP_NUM_THREADS")
        state = PartialState(cpu=not cuda, backend=backend)
    return torch.device(state.device), dist.get_rank()


@contextlib.contextmanager
def _without(*names: str) -> Iterator[None]:
    hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)
