"""Placements of a stage's ranks: the cores and devices of each, and the groups that make room.

Pure functions behind one registry. The configuration names a placement, the selector asks it how
many threads a rank has, the controller asks it where to put a group and which groups must give
their memory back first. Nothing else knows placements apart, so a new one is an entry in
`PLACEMENTS`. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.deployment.stages import PLACED, TRAINING
from earl_core.system.hardware import HostResources
from earl_core.system.settings import Settings


@dataclass(frozen=True)
class Assignment:
    """The share of one host that a group's ranks use. cores: those they may use, all when empty.
    gpus: their indices."""

    cores: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()


class Placement(Protocol):
    """One way to share a host between rollout and training (`update`, and `reference` beside it).

    rollout: devices of all engines together. update: ranks of the update. side_by_side: both may
    work at the same time.
    """

    side_by_side: bool

    def devices(self, rollout: int, update: int) -> int:
        """Devices that a run with such stage deployments needs."""

    def shares(self, devices: int, rollout: int | None, update: int | None) -> tuple[int, int]:
        """Devices for a stage that nobody lays out, rollout and update. None: it is such a one."""

    def threads(self, cores: int, role: str, rollout: int, update: int) -> int:
        """CPU threads for each rank of the role, at least 1."""

    def place(self, deployment: StageDeployment, member: int, site: HostResources) -> Assignment:
        """Assign a share of the host to group `member` of the stage, on a host that has all of the
        stage's groups. Groups that work at the same time share nothing if they can."""

    def gives_way(self, role: str) -> tuple[str, ...]:
        """Roles that must release their devices' memory before a stage of this role runs."""


class Colocated:
    """Rollout and training use all devices, in turn."""

    side_by_side = False

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

    side_by_side = True

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


class Shared(Colocated):
    """Rollout and training use all devices at the same time; nobody makes room for anybody."""

    side_by_side = True

    def place(self, deployment: StageDeployment, member: int, site: HostResources) -> Assignment:
        # Threads move to whatever core is free.
        return Assignment(gpus=_first_devices(deployment, member, site).gpus)

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
    """Give an assignment without cores those of its part, if hosts are parts of one machine."""
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
    """Assign to a group the devices of its member number, counted from the host's first device on;
    no cores in particular where there are too few for all groups of the stage."""
    width = deployment.ranks // deployment.groups
    gpus = _gpus(site)[member * width : (member + 1) * width]
    width *= deployment.threads
    enough = deployment.groups * width <= len(site.cores)
    return Assignment(site.cores[member * width : (member + 1) * width] if enough else (), gpus)


PLACEMENTS: Mapping[str, Placement] = {
    "colocated": Colocated(),
    "separate": Separate(),
    "shared": Shared(),
}
"""Every placement by the name that `stages.placement` gives it."""


class Division(Settings):
    """The division of the devices between rollout and training.

    placement: a name of `PLACEMENTS`. engine_devices: devices of each host that are the engines',
    where the placement gives each side its own; 0: all, or as the stage deployments say.
    """

    placement: str = "colocated"
    engine_devices: int = 0

    @property
    def placed(self) -> Placement:
        """The placement by its name."""
        return PLACEMENTS[self.placement]
