"""Placements of a stage's ranks: the cores and devices of each, and the groups that make room.

A placement is one object with three functions (`Placement`), pure ones. The configuration names it,
one of `PLACEMENTS` or one's own by import path; all that anybody asks of it is asked of a
`CheckedPlacement`, which follows from its three answers and refuses those that make no sense: how
many threads a rank has, where a group is, which groups must give their memory back first. Nothing
else knows placements apart. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.deployment.stages import PLACED, TRAINING
from earl_core.system.errors import ConfigError
from earl_core.system.hardware import HostResources
from earl_core.system.import_path import import_object, is_foreign
from earl_core.system.settings import Settings
from earl_core.system.similar import meant


@dataclass(frozen=True)
class Assignment:
    """The share of one host that a group's ranks use. cores: those they may use, all when empty.
    gpus: their indices."""

    cores: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()


Sides = tuple[Sequence[int], Sequence[int]]
"""Numbers of the devices of a host that the engines have, and of those that the training has."""


class Placement(Protocol):
    """One way to share a host between rollout and training (`update`, and `reference` beside it).

    rollout: devices, or ranks, of all engines of a host together. update: ranks of the update
    there. A device is a GPU, or a core where there are none. Equal questions have equal answers.
    """

    def devices(self, count: int, rollout: int | None, update: int | None) -> Sides:
        """The devices of each side, as numbers from 0 to `count` - 1 without repetitions, in the
        order in which engines, or ranks, take them. None: nobody lays that side out, and it takes
        all that is its. Fewer than were asked for: there are too few."""

    def threads(self, cores: int, rollout: int, update: int) -> tuple[int, int]:
        """CPU threads of each rank of the engines, and of the training; at least 1."""

    def gives_way(self, role: str) -> Sequence[str]:
        """The others of the roles `rollout`, `reference` and `update` that must release their
        devices' memory before a stage of this role runs. Rollout and update either make room for
        each other, and then work in turn, or do not, and then may work at the same time."""


class Colocated:
    """Rollout and training use all devices, in turn."""

    def devices(self, count: int, rollout: int | None, update: int | None) -> Sides:
        return range(count)[:rollout], range(count)[:update]

    def threads(self, cores: int, rollout: int, update: int) -> tuple[int, int]:
        return max(1, cores // rollout), max(1, cores // update)

    def gives_way(self, role: str) -> tuple[str, ...]:
        return tuple(other for other in PLACED if other != role)


class Separate:
    """Engines have the first devices, training the last ones; nobody makes room for anybody."""

    def devices(self, count: int, rollout: int | None, update: int | None) -> Sides:
        rest = count - (count // 2 if rollout is None else rollout)
        first = max(0, count - (rest if update is None else update))
        return range(first)[:rollout], range(count)[first:]

    def threads(self, cores: int, rollout: int, update: int) -> tuple[int, int]:
        each = max(1, cores // (rollout + update))
        return each, each

    def gives_way(self, role: str) -> tuple[str, ...]:
        return ()


class Shared(Colocated):
    """Rollout and training use all devices at the same time; nobody makes room for anybody."""

    def gives_way(self, role: str) -> tuple[str, ...]:
        return ()


PLACEMENTS: Mapping[str, Placement] = {
    "colocated": Colocated(),
    "separate": Separate(),
    "shared": Shared(),
}
"""Every built-in placement by the name that `stages.placement` gives it."""

FUNCTIONS = ("devices", "threads", "gives_way")


@dataclass(frozen=True)
class CheckedPlacement:
    """What follows from a placement's answers. Everything raises `ConfigError` for an answer that
    makes no sense, or an error of the placement's own. name: as the run file has it."""

    name: str
    given: Placement

    def sides(self, count: int, rollout: int | None = None, update: int | None = None) -> Sides:
        """`Placement.devices`, which may be fewer than were asked for."""
        asked = f"devices({count}, {rollout}, {update})"
        found = self._answer("devices", count, rollout, update)
        try:
            engines, training = (tuple(side) for side in found)
            whole = all(type(n) is int for n in (*engines, *training))
        except (TypeError, ValueError):
            whole = False
        if not whole:
            self._refuse(f"{asked} is {found!r}", "return two sequences of device numbers")
        for side, own in (("engines", engines), ("training", training)):
            if len(set(own)) < len(own) or any(not 0 <= n < count for n in own):
                self._refuse(
                    f"{asked} gives the {side} the devices {list(own)}",
                    f"return different numbers from 0 to {count - 1}",
                )
        return engines, training

    def fits(self, count: int, rollout: int, update: int) -> bool:
        """Tell whether both sides have the devices of a host that they ask for, together and, as
        groups are placed, each by itself."""
        both = (self.sides(count, rollout, update), self._taken(count, rollout, update))
        return all(len(own[0]) >= rollout and len(own[1]) >= update for own in both)

    def _taken(self, count: int, rollout: int, update: int) -> Sides:
        """The devices that `place` gives to both sides."""
        engines, training = self.sides(count, rollout)[0], self.sides(count, None, update)[1]
        return engines[:rollout], training[:update]

    def needed(self, rollout: int, update: int, least: int = 1) -> int:
        """The fewest devices of a host, from `least` on, on which both sides have what they ask
        for; 0: as many as both ask for together do not help."""
        counts = range(max(rollout, update, least), rollout + update + 1)
        return next((n for n in counts if self.fits(n, rollout, update)), 0)

    def overlaps(self, count: int) -> bool:
        """Tell whether the sides share devices of a host with so many."""
        engines, training = self.sides(count)
        return not set(engines).isdisjoint(training)

    def threads(self, cores: int, rollout: int, update: int) -> tuple[int, int]:
        """`Placement.threads`."""
        found = self._answer("threads", cores, rollout, update)
        whole = isinstance(found, tuple | list) and len(found) == 2
        if not whole or not all(type(each) is int and each >= 1 for each in found):
            self._refuse(
                f"threads({cores}, {rollout}, {update}) is {found!r}",
                "return two numbers of threads, at least 1",
            )
        return found[0], found[1]

    def gives_way(self, role: str) -> tuple[str, ...]:
        """`Placement.gives_way`; none for roles without a place."""
        if role not in PLACED:
            return ()
        found = self._answer("gives_way", role)
        others = [other for other in PLACED if other != role]
        if not isinstance(found, tuple | list) or any(x not in others for x in found):
            self._refuse(
                f"gives_way({role!r}) is {found!r}", f"return a tuple with some of {others}, or ()"
            )
        return tuple(found)

    @property
    def side_by_side(self) -> bool:
        """True when rollout and update may work at the same time."""
        first, second = "update" in self.gives_way("rollout"), "rollout" in self.gives_way("update")
        if first != second:
            one, other = ("rollout", "update") if first else ("update", "rollout")
            self._refuse(
                f"gives_way({one!r}) has {other}, and gives_way({other!r}) has no {one}",
                "have both make room for each other, or neither",
            )
        return not first

    @property
    def own(self) -> bool:
        """True for one of the user's."""
        return self.name not in PLACEMENTS

    def answers(self, count: int, cores: int, rollout: int, update: int) -> str:
        """All that it says of a host: of a plan that was made by it, as much as a name says of one
        of EARL's. count: devices."""
        sides = [self.sides(count), self.sides(count, rollout, update)]
        return repr((sides, self.threads(cores, rollout, update), *map(self.gives_way, PLACED)))

    def check_memory(self, count: int, rollout: int | None, update: int | None) -> None:
        """Raise `ConfigError` where both sides would have the memory of the same GPUs at the same
        time. count: GPUs of a host, on which the sides fit. None: as for `Placement.devices`."""
        both = self.sides(count, rollout, update)
        engines, training = self._taken(count, rollout or len(both[0]), update or len(both[1]))
        if self.side_by_side and not set(engines).isdisjoint(training):
            raise ConfigError(
                f"stages.placement `{self.name}` has engine and trainer in the memory of the same "
                "devices at the same time, which is not divided between them on GPUs: use "
                "`separate` or `colocated`"
                + (", or have the two give way to each other" if self.own else "")
            )

    def place(self, deployment: StageDeployment, member: int, site: HostResources) -> Assignment:
        """Assign a share of the host to group `member` of the stage, on a host that has all of the
        stage's groups. Groups that work at the same time share nothing if they can."""
        trains = deployment.stage in TRAINING
        asked = (None, deployment.ranks) if trains else (deployment.ranks, None)
        width = deployment.ranks // deployment.groups
        taken = slice(member * width, (member + 1) * width)
        gpus: tuple[int, ...] = ()
        if site.gpus:
            numbers = self.sides(site.gpus, *asked)[trains][taken]
            gpus = tuple(site.first_gpu + number for number in numbers)
        return Assignment(self._cores(deployment, taken, trains, site), gpus)

    def _cores(
        self, deployment: StageDeployment, taken: slice, trains: bool, site: HostResources
    ) -> tuple[int, ...]:
        """None in particular where nobody else works at that time, where the sides share all, or
        where there are too few for all groups of the stage: threads then move to whatever core is
        free. The side with the lower devices has the first cores, the other one the last."""
        engines, training = self.sides(site.gpus or len(site.cores))
        apart = set(engines).isdisjoint(training)
        beside = self.side_by_side
        if not apart if beside else deployment.groups == 1:
            return ()
        threads, all_of_it = deployment.threads, deployment.ranks * deployment.threads
        if all_of_it > len(site.cores) or (trains and all_of_it == len(site.cores)):
            return ()
        last = beside and trains == (min(engines, default=0) <= min(training, default=0))
        own = site.cores[len(site.cores) - all_of_it :] if last else site.cores
        return own[taken.start * threads : taken.stop * threads]

    def _answer(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self.given, function)(*arguments)
        except Exception as error:  # code of others runs, and may raise anything
            asked = ", ".join(map(repr, arguments))
            raise ConfigError(
                f"stages.placement {self.name!r}: {function}({asked}) raises "
                f"{type(error).__name__}: {error}",
                remedy="have it answer, or choose another placement",
            ) from error

    def _refuse(self, problem: str, remedy: str) -> None:
        raise ConfigError(f"stages.placement {self.name!r}: {problem}", remedy=remedy)


@lru_cache
def find_placement(name: str) -> CheckedPlacement:
    """The placement of this name or import path, imported once. Raises `ConfigError`."""
    if name in PLACEMENTS:
        return CheckedPlacement(name, PLACEMENTS[name])
    found = import_object(name, "stages.placement")
    lacking = [each for each in FUNCTIONS if not callable(getattr(found, each, None))]
    if lacking or isinstance(found, type):
        raise ConfigError(
            f"stages.placement {name!r} is "
            + (f"without the functions {lacking}" if lacking else "a class, and no object"),
            remedy=f"name an object with the functions {', '.join(FUNCTIONS)}",
        )
    return CheckedPlacement(name, found)


def name_problem(name: str) -> str:
    """Say why this cannot name a placement; empty: it can. Imports nothing."""
    if name in PLACEMENTS or is_foreign(name):
        return ""
    return (
        f"there is no placement {name!r}: {meant(name, PLACEMENTS)}choose from "
        f"{', '.join(PLACEMENTS)}, or give an import path package.module:object"
    )


Place = tuple[int, Assignment]
"""A rank's host, by its number, and what the group has there."""


def spread(
    placement: CheckedPlacement,
    deployment: StageDeployment,
    member: int,
    hosts: Sequence[HostResources],
) -> tuple[Place, ...]:
    """The place of each rank of group `member`, those of one host one after the other; nothing of
    it in particular for a stage whose ranks have no place.

    Every host has as many engines, or replicas of a mesh, as the others, or fewer at the end; the
    devices of an engine, and ranks that share matrices or tokens, are of one host.
    """
    unit, each = _units(deployment, len(hosts))
    units = deployment.ranks // unit

    def assigned(host: int, replicas: int, shard: int, member: int = 0) -> Assignment:
        if deployment.stage not in PLACED:
            return Assignment()
        here = deployment._replace(replicas=replicas, shard=shard)
        given = placement.place(here, member, hosts[host])
        if given.cores or len(hosts) == 1:
            return given
        # Hosts may be parts of one machine.
        return replace(given, cores=hosts[host].cores)

    if deployment.stage == "rollout":
        host, member = divmod(member, each)
        return ((host, assigned(host, min(each, units - host * each), 1, member)),)
    places: list[Place] = []
    for host in range(math.ceil(units / each)):
        count = min(each, units - host * each)
        places += [(host, assigned(host, count, 1))] * (count * unit)
    return tuple(places)


def most_on_a_host(deployment: StageDeployment, hosts: int) -> int:
    """Ranks of the stage on the host that has most of them."""
    unit, each = _units(deployment, hosts)
    return unit * each


def hosts_of(deployment: StageDeployment, hosts: int) -> int:
    """Hosts that have ranks of the stage, of so many."""
    return math.ceil(deployment.ranks / most_on_a_host(deployment, hosts))


def _units(deployment: StageDeployment, hosts: int) -> tuple[int, int]:
    """Ranks that must share a host, and how many such groups each host has at most."""
    unit = deployment.tensor_parallel * deployment.context_parallel
    return unit, math.ceil(deployment.ranks // unit / hosts)


class Division(Settings):
    """The division of the devices between rollout and training.

    placement: as `find_placement` takes it. engine_devices: devices of each host that are the
    engines', where the placement gives each side its own; 0: all, or as the stage deployments say.
    """

    placement: str = "colocated"
    engine_devices: int = 0

    @property
    def placed(self) -> CheckedPlacement:
        """The placement by its name. Raises what `find_placement` raises."""
        return find_placement(self.placement)
