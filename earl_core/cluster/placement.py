"""Where worker groups run: which cores and devices are whose, and who makes room for whom.

Pure functions behind one registry: the configuration names a placement, the selector asks it how
many threads a rank has, the controller asks it where to put a group and which groups must give
their memory back first. Nothing else knows placements apart, so a new one is an entry in
`PLACEMENTS`. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from earl_core.cluster.context import WorkerContext

_TRAINING = ("reference", "update")


@dataclass(frozen=True)
class HostResources:
    """The host's units. cores: their numbers. gpus: how many; a rank then has one of its own."""

    cores: tuple[int, ...]
    gpus: int = 0


@dataclass(frozen=True)
class ResourceRequest:
    """A group to place: member `member` of the `members` groups of a role, `ranks` devices wide,
    with `threads` CPU threads for each of them."""

    role: str
    ranks: int
    threads: int
    member: int = 0
    members: int = 1


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
        """Devices that a run with such layouts needs."""

    def threads(self, cores: int, role: str, rollout: int, update: int) -> int:
        """CPU threads for each rank of the role, at least 1."""

    def place(self, wish: ResourceRequest, site: HostResources) -> Assignment:
        """Where the group runs. Groups that work at the same time share nothing if they can."""

    def gives_way(self, role: str) -> tuple[str, ...]:
        """Roles that must release their devices' memory before a stage of this role runs."""


class Colocated:
    """Rollout and training use all devices, in turn."""

    def devices(self, rollout: int, update: int) -> int:
        return max(rollout, update)

    def threads(self, cores: int, role: str, rollout: int, update: int) -> int:
        return max(1, cores // (rollout if role == "rollout" else update))

    def place(self, wish: ResourceRequest, site: HostResources) -> Assignment:
        gpus = tuple(range(site.gpus))[_slot(wish, wish.ranks)]
        if wish.members == 1:
            # Nobody else works at that time: threads may move to whatever core is free.
            return Assignment(gpus=gpus)
        return Assignment(_cores(site.cores, wish), gpus)

    def gives_way(self, role: str) -> tuple[str, ...]:
        others = {"rollout": _TRAINING, "update": ("rollout", "reference")}
        return others.get(role, ("rollout", "update") if role == "reference" else ())


class Separate:
    """Engines have the first devices, training the last ones; nobody makes room for anybody."""

    def devices(self, rollout: int, update: int) -> int:
        return rollout + update

    def threads(self, cores: int, role: str, rollout: int, update: int) -> int:
        return max(1, cores // (rollout + update))

    def place(self, wish: ResourceRequest, site: HostResources) -> Assignment:
        if wish.role in _TRAINING:
            wanted = wish.ranks * wish.threads
            gpus = tuple(range(site.gpus))[-wish.ranks :]
            return Assignment(site.cores[-wanted:] if wanted < len(site.cores) else (), gpus)
        gpus = tuple(range(site.gpus))[_slot(wish, wish.ranks)]
        return Assignment(_cores(site.cores, wish), gpus)

    def gives_way(self, role: str) -> tuple[str, ...]:
        return ()


def _slot(wish: ResourceRequest, width: int) -> slice:
    return slice(wish.member * width, (wish.member + 1) * width)


def _cores(cores: Sequence[int], wish: ResourceRequest) -> tuple[int, ...]:
    """The member's own cores; none in particular where there are too few for all members."""
    width = wish.ranks * wish.threads
    enough = wish.members * width <= len(cores)
    return tuple(cores[_slot(wish, width)]) if enough else ()


PLACEMENTS: Mapping[str, Placement] = {"colocated": Colocated(), "separate": Separate()}
"""Every placement by the name that `layout.placement` gives it."""

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
    from earl_core.cluster.rank_process import load_target

    if cores:
        os.sched_setaffinity(0, cores)
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(index) for index in range(max(gpus) + 1)]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[index] for index in gpus)
    return load_target(target)(context, deployment, **arguments)
