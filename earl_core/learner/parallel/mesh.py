"""The device mesh of an update: how ranks are numbered, and the process groups of one rank.

Ranks are numbered along `AXES`, the last one fastest: the numbering of
`earl_core.dispatch.reads.plan.Layout`. Ranks that differ only in context and tensor parallelism
form a data-parallel replica: they see the same samples. accelerate owns the process
state: devices, launch variables, the connection to the other ranks. This module imports no torch
until a mesh is made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np

from earl_core.cluster.host import take_listener
from earl_core.deployment.stage_deployment import AXES, StageDeployment
from earl_core.learner.parallel.expert_mesh import ExpertMesh, expert_mesh, forget_experts
from earl_core.system.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from earl_core.tensors.collectives import GroupName

# Groups over several dimensions of the mesh. Context ranks hold parts of the parameters like shard
# ranks do, because the gradients of both are sums over tokens.
COMBINED: dict[str, tuple[str, ...]] = {
    "data_parallel": ("replicas", "shard"),
    "parameters": ("shard", "context_parallel"),
    "replica": ("context_parallel", "tensor_parallel"),
    "world": AXES,
}


ALONE = StageDeployment("update")
"""One rank."""

_TIMEOUT = timedelta(minutes=30)
"""Time after which a collective that others have left waiting fails."""

_WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


@dataclass(eq=False)
class UpdateMesh:
    """One rank's view of the mesh it is in.

    deployment: its origin, of which only the axes count here. device_mesh: dimensions `AXES`; None
    for a single rank, which has no process group. hosts: of each rank, if they are on several.
    experts: the same ranks as experts see them; None where these are not divided.
    """

    deployment: StageDeployment
    rank: int
    device: torch.device
    device_mesh: DeviceMesh | None = None
    hosts: Sequence[str] = ()
    experts: ExpertMesh | None = None
    _meshes: dict[str, DeviceMesh] = field(default_factory=dict)
    _groups: dict[str, ProcessGroup] = field(default_factory=dict)

    @property
    def coordinates(self) -> tuple[int, int, int, int]:
        """Coordinates of this rank along each of `AXES`."""
        replica, shard, context, tensor = np.unravel_index(self.rank, self.deployment.axes)
        return int(replica), int(shard), int(context), int(tensor)

    @property
    def data_rank(self) -> int:
        """Number of the data-parallel replica that this rank is in."""
        return self.coordinates[0] * self.deployment.shard + self.coordinates[1]

    @property
    def context_rank(self) -> int:
        """Number of the part of each pack's tokens that this rank computes."""
        return self.coordinates[2]

    @property
    def tensor_rank(self) -> int:
        """Number of the part of each matrix that this rank holds."""
        return self.coordinates[3]

    @property
    def leader(self) -> bool:
        """True on the rank that speaks for its replica."""
        return self.context_rank == 0 and self.tensor_rank == 0

    def group(self, name: GroupName) -> ProcessGroup | None:
        """The ranks that differ from this one only in the named dimensions; None if it is alone.

        "data_parallel": replicas x shard. "parameters": shard x context, which hold the parts of
        one copy. "replica": context x tensor.
        """
        return self._groups.get(name)

    def submesh(self, name: GroupName) -> DeviceMesh:
        """The one-dimensional device mesh of a group with several ranks."""
        return self._meshes[name]

    @property
    def parameter_mesh(self) -> DeviceMesh:
        """Mesh over which FSDP2 shards parameters: (copies of them,) parts. With a single part a
        mesh of this rank alone, whatever copies there are."""
        from torch.distributed.device_mesh import DeviceMesh

        if self.device_mesh is None:
            return _mesh_of_one(self.device)
        if "parameters" not in self._meshes:
            return self.device_mesh["shard"]
        parts = self._meshes["parameters"]
        copies = self._meshes.get("replicas")
        return parts if copies is None else DeviceMesh._concatenate([copies, parts])

    def close(self) -> None:
        """Use this mesh no more. Its groups stay for the next mesh of its shape."""
        self.device_mesh = self.experts = None
        self._groups, self._meshes = {}, {}

    def _connect(self) -> None:
        """Make all groups, in one order on all ranks."""
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        axes = self.deployment.axes
        mesh = init_device_mesh(self.device.type, axes, mesh_dim_names=AXES)
        self.device_mesh = mesh
        sizes = dict(zip(AXES, axes, strict=True))
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
        if self.device.type == "cuda":
            # NCCL's first exchange in a group must be everyone's; a reshard's is of some ranks.
            dist.all_reduce(torch.zeros(1, device=self.device))


# Groups are kept while the world is connected: DTensor remembers how it moved tensors on a mesh and
# takes those groups again on an equal one.
_CONNECTED: dict[tuple[int, ...], UpdateMesh] = {}


def create_mesh(deployment: StageDeployment = ALONE, hosts: Sequence[str] = ()) -> UpdateMesh:
    """Connect this process, as launched, with the other ranks of the mesh.

    Reads RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; gloo on the CPU, NCCL on CUDA
    (with gloo for what lies in the host's memory). All ranks call it alike; a
    connected process may call it again for another mesh of the same size. A mesh of one rank
    connects to nobody, whatever the variables say.

    Raises ConfigError when the number of ranks launched is not the mesh's.
    """
    ranks, axes = deployment.ranks, deployment.axes
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 and ranks != launched:
        raise ConfigError(
            f"The mesh {deployment.label} has {ranks} ranks, but {launched} were launched: change "
            "the update's stage deployment or the number of ranks."
        )
    device, rank = _process_state(ranks)
    mesh = UpdateMesh(deployment, rank, device, hosts=hosts)
    if ranks > 1:
        if axes not in _CONNECTED:
            mesh._connect()
            _CONNECTED[axes] = mesh
        experts = expert_mesh(deployment, device.type)
        mesh = dataclasses.replace(_CONNECTED[axes], deployment=deployment, experts=experts)
    return mesh


def join_world(backend: str, timeout: timedelta) -> None:
    """Connect this process with the other ranks through torch.distributed.

    Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Rank 0 listens there alone, not on every
    interface, as torch.distributed left to itself does. Raises `OSError` when it cannot and
    `torch.distributed.DistError` when the others do not come in time.
    """
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        size,
        is_master=rank == 0,
        timeout=timeout,
        master_listen_fd=take_listener() if rank == 0 else None,
    )
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def leave_world() -> None:
    """Disconnect this process from all others, if it is connected; for good: see `_CONNECTED`."""
    import torch.distributed as dist
    from accelerate.state import AcceleratorState

    if dist.is_available() and dist.is_initialized():
        _CONNECTED.clear()
        forget_experts()
        dist.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)


def _process_state(ranks: int) -> tuple[torch.device, int]:
    import torch
    import torch.distributed as dist
    from accelerate import PartialState
    from accelerate.state import AcceleratorState

    cuda = torch.cuda.is_available()
    if ranks == 1:
        # From these accelerate would conclude that there are other ranks to wait for.
        with _without("LOCAL_RANK", *_WORLD_SIZES):
            return torch.device(PartialState(cpu=not cuda).device), 0
    backend = "cuda:nccl,cpu:gloo" if cuda else "gloo"
    if dist.is_initialized() and dist.get_world_size() == 1:
        leave_world()
    if not dist.is_initialized():
        # A mesh of one rank may have been made before, and accelerate keeps what it found then.
        AcceleratorState._reset_state(reset_partial_state=True)
        # accelerate takes a world that is there already; one of its own listens everywhere.
        join_world(backend, _TIMEOUT)
    with warnings.catch_warnings():
        # The learner sets its threads itself.
        warnings.filterwarnings("ignore", message="OMP_NUM_THREADS")
        state = PartialState(cpu=not cuda, backend=backend)
    return torch.device(state.device), dist.get_rank()


def _mesh_of_one(device: torch.device) -> DeviceMesh:
    """Make a mesh for code that wants one and reaches nobody: its group connects to nothing."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=1)
    alone = dist.new_group([dist.get_rank()], backend="fake", use_local_synchronization=True)
    return DeviceMesh.from_group(alone, device.type, mesh_dim_names=("shard",))


@contextlib.contextmanager
def _without(*names: str) -> Iterator[None]:
    hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)
