"""Where worker groups run: which cores and devices are whose, and who makes room for whom.

Pure functions behind one registry: the configuration names a placement, the selector asks it how
many threads a rank has, the controller asks it where to put a group and which groups must give
their memory back first. Nothing else knows placements apart, so a new one is an entry in
`PLACEMENTS`. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from earl_core.cluster.context import WorkerContext
from earl_core.cluster.stage_deployment import StageDeployment
from earl_core.system.import_path import load_object

_TRAINING = ("reference", "update")


@dataclass(frozen=True)
class HostResources:
    """The host's units. cores: their numbers. gpus: how many; a rank then has one of its own."""

    cores: tuple[int, ...]
    gpus: int = 0


@dataclass(frozen=True)
class Assignment:
    """Where a group runs. cores: those it may use, all when empty. gpus: their indices."""

    cores: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()


class Placement(Protocol):
    """One way to share a host between rollout and training (`update`, and `reference` beside it).

    rollout: devices of all engines together. update: ranks of the update.
    """

    def devices(self, rollout: int, update: int) -> int:
        """Devices that a run with such stage deployments needs."""

    def threads(self, cores: int, role: str, rollout: int, update: int) -> int:
        """CPU threads for each rank of the role, at least 1."""

    def place(self, deployment: StageDeployment, member: int, site: HostResources) -> Assignment:
        """Where group `member` of the stage runs. Groups that work at the same time share nothing
        if they can."""

    def gives_way(self, role: str) -> tuple[str, ...]:
        """Roles that must release their devices' memory before a stage of this role runs."""


class Colocated:
    """Rollout and training use all devices, in turn."""

    def devices(self, rollout: int, update: int) -> int:
        return max(rollout, update)

    def threads(self, cores: int, role: str, rollout: int, update: int) -> int:
        return max(1, cores // (rollout if role == "rollout" else update))

    def place(self, deployment: StageDeployment, member: int, site: HostResources) -> Assignment:
        first = _first_devices(deployment, member, site)
        # Where nobody else works at that time, threads may move to whatever core is free.
        return first if deployment.groups > 1 else Assignment(gpus=first.gpus)

    def gives_way(self, role: str) -> tuple[str, ...]:
        others = {"rollout": _TRAINING, "update": ("rollout", "reference")}
        return others.get(role, ("rollout", "update") if role == "reference" else ())


class Separate:
    """Engines have the first devices, training the last ones; nobody makes room for anybody."""

    def devices(self, rollout: int, update: int) -> int:
        return rollout + update

    def threads(self, cores: int, role: str, rollout: int, update: int) -> int:
        return max(1, cores // (rollout + update))

    def place(self, deployment: StageDeployment, member: int, site: HostResources) -> Assignment:
        if deployment.stage not in _TRAINING:
            return _first_devices(deployment, member, site)
        wanted = deployment.ranks * deployment.threads
        gpus = tuple(range(site.gpus))[-deployment.ranks :]
        return Assignment(site.cores[-wanted:] if wanted < len(site.cores) else (), gpus)

    def gives_way(self, role: str) -> tuple[str, ...]:
        return ()


def _first_devices(deployment: StageDeployment, member: int, site: HostResources) -> Assignment:
    """Of the stage's groups, from the first device on, the member's; no cores in particular where
    there are too few for all of them."""
    width = deployment.ranks // deployment.groups
    gpus = tuple(range(site.gpus))[member * width : (member + 1) * width]
    width *= deployment.threads
    enough = deployment.groups * width <= len(site.cores)
    return Assignment(site.cores[member * width : (member + 1) * width] if enough else (), gpus)


PLACEMENTS: Mapping[str, Placement] = {"colocated": Colocated(), "separate": Separate()}
"""Every placement by the name that `stages.placement` gives it."""

PLACED = ("rollout", *_TRAINING)
"""Roles that have a place; those of the others are too light to matter."""


def build(
    context: WorkerContext,
    deployment: dict[str, Any],
    *,
    target: str,
    cores: list[int],
    gpus: list[int],
    arguments: dict[str, Any],
) -> Any:
    """A worker group's target that settles in its place first, then builds the real `target`.

    Threads and processes that the target starts inherit the cores. Devices are counted among those
    that CUDA_VISIBLE_DEVICES already left visible.
    """
    if cores:
        os.sched_setaffinity(0, cores)
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(index) for index in range(max(gpus) + 1)]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[index] for index in gpus)
    return load_object(target)(context, deployment, **arguments)
