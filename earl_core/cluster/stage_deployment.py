"""How one stage is laid out on the hardware, from configuration to mesh, and where its ranks run.

A `StageDeployment` says how many ranks there are along which axes. A placement says which cores and
devices are whose, and who makes room for whom: pure functions behind one registry. The
configuration names a placement, the selector asks it how many threads a rank has, the controller
asks it where to put a group and which groups must give their memory back first. Nothing else knows
placements apart, so a new one is an entry in `PLACEMENTS`. Imports no torch.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple, Protocol, get_args

from pydantic import BeforeValidator, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema
from pydantic_core.core_schema import (
    no_info_after_validator_function,
    plain_serializer_function_ser_schema,
)

from earl_core.cluster.rank_process import WorkerContext
from earl_core.cluster.stages import PLACED, TRAINING
from earl_core.system.errors import ConfigError
from earl_core.system.hardware import HostResources
from earl_core.system.import_path import load_object
from earl_core.system.plural import plural

Degree = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=0)]

Checkpointing = Literal["none", "selective", "full"]
"""What a decoder layer keeps of its activations for the backward pass: all of them; what matrix
products and attention gave; its input alone. The rest is computed again."""

CHECKPOINTING: tuple[Checkpointing, ...] = get_args(Checkpointing)
"""From the fastest to the smallest."""


def _checkpointing(stored: Any) -> Any:
    """Plans and observations of earlier versions say whether a layer keeps its input alone."""
    return {True: "full", False: "none"}[stored] if isinstance(stored, bool) else stored


AXES = ("replicas", "shard", "context_parallel", "tensor_parallel")
"""The axes of a mesh, in the order of rank numbers, the fastest last."""


class StageDeployment(NamedTuple):
    """How one stage is laid out for one iteration; its worker groups follow when it changes.

    rollout: `replicas` engines of `tensor_parallel` devices each. Training stages: a mesh of
    replicas (copies of the parameters) x shard (ranks that share one copy, FSDP) x
    context_parallel (ranks that share the tokens of each microbatch) x tensor_parallel (ranks that
    share each matrix). threads: CPU threads of each device. max_model_len: tokens of one sequence.
    logits_chunk_tokens: positions whose logits exist at a time. offload_optimizer: its state lies
    in the host's memory. 0 for a size: it has no limit here.

    A plain tuple, because a choice makes hundreds within milliseconds; pydantic checks it as a
    field of a model, and writes it as a mapping.
    """

    stage: str
    replicas: Degree = 1
    tensor_parallel: Degree = 1
    context_parallel: Degree = 1
    shard: Degree = 1
    threads: Degree = 1
    max_tokens_per_microbatch: Size = 0
    max_model_len: Size = 0
    max_running_requests: Size = 0
    activation_checkpointing: Annotated[Checkpointing, BeforeValidator(_checkpointing)] = "none"
    logits_chunk_tokens: Size = 0
    offload_optimizer: bool = False

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        written = plain_serializer_function_ser_schema(cls._asdict)
        return no_info_after_validator_function(cls._make, handler(source), serialization=written)

    @property
    def axes(self) -> tuple[int, int, int, int]:
        """Ranks along each of `AXES`."""
        return self.replicas, self.shard, self.context_parallel, self.tensor_parallel

    @property
    def ranks(self) -> int:
        """Ranks of all groups together, each with a device of its own (on a CPU, with `threads`
        cores)."""
        return math.prod(self.axes)

    @property
    def groups(self) -> int:
        """Worker groups: one for each engine, else one of all ranks."""
        return self.replicas if self.stage == "rollout" else 1

    @property
    def world_size(self) -> int:
        """Worker processes: an engine has one, whatever runs inside it."""
        return self.replicas if self.stage == "rollout" else self.ranks

    @property
    def data_parallel(self) -> int:
        """Ranks that see different samples."""
        return self.replicas * self.shard

    @property
    def parts(self) -> int:
        """Ranks that share the parameters of one copy, tensor parallelism aside: context ranks hold
        parts of them as shard ranks do."""
        return self.shard * self.context_parallel

    @property
    def label(self) -> str:
        """In a few words, for tables and reasons."""
        words = [f"TP {self.tensor_parallel}"]
        words += [f"CP {self.context_parallel}"] if self.context_parallel > 1 else []
        words += [f"shard {self.shard}"] if self.shard > 1 else []
        words += [f"x {self.replicas}"] if self.replicas > 1 or self.stage == "rollout" else []
        words += [f"{self.threads} threads"] if self.threads > 1 else []
        words += [f"microbatch {size}"] if (size := self.max_tokens_per_microbatch) else []
        words += [f"at most {most} running"] if (most := self.max_running_requests) else []
        words += {"none": [], "selective": ["selective checkpointing"], "full": ["checkpointing"]}[
            self.activation_checkpointing
        ]
        words += [f"logits by {size}"] if (size := self.logits_chunk_tokens) else []
        words += ["optimizer offloaded"] if self.offload_optimizer else []
        return ", ".join(words).replace(", x ", " x ")


Move = Literal["none", "settings", "reshard", "rebuild"]
"""`settings`: live ranks take other limits and move nothing. `reshard`: live ranks exchange their
slices. `rebuild`: the processes end and others start."""


def move_between(before: StageDeployment, after: StageDeployment) -> Move:
    """What leads from one stage deployment to another of the same stage."""
    if before == after:
        return "none"
    if before.stage == "rollout":
        limited = before._replace(max_running_requests=after.max_running_requests)
        return "settings" if limited == after else "rebuild"
    if before.stage != "update" or before.ranks != after.ranks:
        return "rebuild"
    same = before.axes == after.axes and before.offload_optimizer == after.offload_optimizer
    return "settings" if same else "reshard"


@dataclass(frozen=True)
class Assignment:
    """What a group's ranks on one host use. cores: those it may use, all when empty. gpus: their
    indices."""

    cores: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()


class Placement(Protocol):
    """One way to share a host between rollout and training (`update`, and `reference` beside it).

    rollout: devices of all engines together. update: ranks of the update.
    """

    def devices(self, rollout: int, update: int) -> int:
        """Devices that a run with such stage deployments needs."""

    def shares(self, devices: int, rollout: int | None, update: int | None) -> tuple[int, int]:
        """Devices for a stage that nobody lays out, rollout and update. None: it is such a one."""

    def threads(self, cores: int, role: str, rollout: int, update: int) -> int:
        """CPU threads for each rank of the role, at least 1."""

    def place(self, deployment: StageDeployment, member: int, site: HostResources) -> Assignment:
        """What group `member` of the stage uses of a host that has all of the stage's groups.
        Groups that work at the same time share nothing if they can."""

    def gives_way(self, role: str) -> tuple[str, ...]:
        """Roles that must release their devices' memory before a stage of this role runs."""


class Colocated:
    """Rollout and training use all devices, in turn."""

    def devices(self, rollout: int, update: int) -> int:
        return max(rollout, update)

    def shares(self, devices: int, rollout: int | None, update: int | None) -> tuple[int, int]:
        return devices, devices

    def threads(self, cores: int, role: str, rollout: int, update: int) -> int:
        return max(1, cores // (rollout if role == "rollout" else update))

    def place(self, deployment: StageDeployment, member: int, site: HostResources) -> Assignment:
        first = _first_devices(deployment, member, site)
        # Where nobody else works at that time, threads may move to whatever core is free.
        return first if deployment.groups > 1 else Assignment(gpus=first.gpus)

    def gives_way(self, role: str) -> tuple[str, ...]:
        return tuple(other for other in PLACED if other != role) if role in PLACED else ()


class Separate:
    """Engines have the first devices, training the last ones; nobody makes room for anybody."""

    def devices(self, rollout: int, update: int) -> int:
        return rollout + update

    def shares(self, devices: int, rollout: int | None, update: int | None) -> tuple[int, int]:
        half = devices // 2
        engines = max(1, half if update is None else devices - update)
        return engines, max(1, devices - (rollout or engines))

    def threads(self, cores: int, role: str, rollout: int, update: int) -> int:
        return max(1, cores // (rollout + update))

    def place(self, deployment: StageDeployment, member: int, site: HostResources) -> Assignment:
        if deployment.stage not in TRAINING:
            return _first_devices(deployment, member, site)
        wanted = deployment.ranks * deployment.threads
        gpus = _gpus(site)[-deployment.ranks :]
        return Assignment(site.cores[-wanted:] if wanted < len(site.cores) else (), gpus)

    def gives_way(self, role: str) -> tuple[str, ...]:
        return ()


Place = tuple[int, Assignment]
"""A rank's host, by its number, and what the group has there."""


def spread(
    placement: Placement, deployment: StageDeployment, member: int, hosts: Sequence[HostResources]
) -> tuple[Place, ...]:
    """The place of each rank of group `member`, those of one host one after the other.

    Every host has as many engines, or replicas of a mesh, as the others, or fewer at the end; the
    devices of an engine, and ranks that share matrices or tokens, are of one host.
    """
    unit, each = _units(deployment, len(hosts))
    units = deployment.ranks // unit
    if deployment.stage == "rollout":
        host, member = divmod(member, each)
        here = deployment._replace(replicas=min(each, units - host * each))
        return ((host, _own(placement.place(here, member, hosts[host]), hosts, host)),)
    places: list[Place] = []
    for host in range(math.ceil(units / each)):
        count = min(each, units - host * each)
        here = deployment._replace(replicas=count, shard=1)
        place = _own(placement.place(here, 0, hosts[host]), hosts, host)
        places += [(host, place)] * here.ranks
    return tuple(places)


def _own(given: Assignment, hosts: Sequence[HostResources], host: int) -> Assignment:
    """Not the cores of another part of the same machine."""
    return given if given.cores or len(hosts) == 1 else replace(given, cores=hosts[host].cores)


def most_on_a_host(deployment: StageDeployment, hosts: int) -> int:
    """Ranks of the stage on the host that has most of them."""
    unit, each = _units(deployment, hosts)
    return unit * each


def _units(deployment: StageDeployment, hosts: int) -> tuple[int, int]:
    """Ranks that must share a host, and how many such groups each host has at most."""
    unit = deployment.tensor_parallel * deployment.context_parallel
    return unit, math.ceil(deployment.ranks // unit / hosts)


def _gpus(site: HostResources) -> tuple[int, ...]:
    return tuple(range(site.first_gpu, site.first_gpu + site.gpus))


def _first_devices(deployment: StageDeployment, member: int, site: HostResources) -> Assignment:
    """Of the stage's groups, from the first device on, the member's; no cores in particular where
    there are too few for all of them."""
    width = deployment.ranks // deployment.groups
    gpus = _gpus(site)[member * width : (member + 1) * width]
    width *= deployment.threads
    enough = deployment.groups * width <= len(site.cores)
    return Assignment(site.cores[member * width : (member + 1) * width] if enough else (), gpus)


PLACEMENTS: Mapping[str, Placement] = {"colocated": Colocated(), "separate": Separate()}
"""Every placement by the name that `stages.placement` gives it."""


def build(
    context: WorkerContext,
    deployment: dict[str, Any],
    *,
    target: str,
    assignments: list[dict[str, list[int]]],
    gpus_of_host: int,
    arguments: dict[str, Any],
) -> Any:
    """A worker group's target that settles in its place first, then builds the real `target`.

    assignments: the dumped `Assignment` of each rank. gpus_of_host: as it was read; torch must not
    contradict. Threads and processes that the target starts inherit the cores. Devices are counted
    among those that CUDA_VISIBLE_DEVICES left visible.
    """
    cores, gpus = (assignments[context.rank][name] for name in ("cores", "gpus"))
    if cores:
        os.sched_setaffinity(0, cores)
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(index) for index in range(max(gpus) + 1)]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[index] for index in gpus)
    load = load_object(target)
    # To count its devices CUDA starts, after which no process can be forked that uses it, and an
    # engine may fork: there a GPU that torch does not see shows by itself.
    if not (gpus_of_host and (not gpus or deployment.get("stage") == "rollout")):
        _check_gpus(gpus_of_host)
    return load(context, deployment, **arguments)


def _check_gpus(gpus_of_host: int) -> None:
    """Raise `ConfigError` where torch, if the target has imported it, sees a GPU that was not read,
    or none in place of one: all sizes were planned for the other device."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    found = bool(torch.cuda.is_available())
    if found and not gpus_of_host:
        raise ConfigError(
            "torch sees a GPU, and the run was planned for a CPU, because no NVIDIA driver told of "
            "one",
            remedy="see `earl doctor`, or export CUDA_VISIBLE_DEVICES= to work on the CPU alone",
        )
    if not found and gpus_of_host:
        raise ConfigError(
            f"the run was planned for {plural(gpus_of_host, 'GPU')} on this host, and torch "
            f"{torch.__version__} sees none",
            remedy="see `earl doctor`: the driver may be too old for torch's CUDA, or torch a "
            "build for CPUs",
        )
