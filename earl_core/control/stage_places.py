"""Where the stages of an iteration are: which ranks, on which host, with which cores or devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from earl_core.config import RunConfig
from earl_core.deployment.placement import Assignment, Place, spread
from earl_core.deployment.plan import DeploymentPlan
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.deployment.stages import PLAYED, STAGES, taking_part
from earl_core.system.hardware import HostResources


class Seat(NamedTuple):
    """Processes of a stage that have one place. devices: in words."""

    stage: str
    who: str
    host: str
    devices: str
    threads: int


@dataclass(frozen=True)
class Site:
    """The hosts of a run, and the plan by which the stages are laid out over them."""

    config: RunConfig
    plan: DeploymentPlan
    names: Sequence[str]
    resources: Sequence[HostResources]

    def deployment(self, stage: str) -> StageDeployment:
        """The deployment of the ranks that do the stage."""
        role = STAGES[stage].done_by(self.config)
        if role in self.plan.stages:
            return self.plan.stages[role]
        # Demonstrations are read by one process, whatever the plan is.
        return StageDeployment(stage)

    def places(self, stage: str) -> list[tuple[Place, ...]]:
        """The place of each rank of each worker group of the stage."""
        division = self.plan.division or self.config.stages.division
        deployment = self.deployment(stage)
        return [
            spread(division.placed, deployment, member, self.resources)
            for member in range(deployment.groups)
        ]

    def hosts_of(self, stage: str) -> tuple[str, ...]:
        """The host of each rank, or of each engine, as manifests name it."""
        return tuple(self.names[host] for group in self.places(stage) for host, _ in group)

    def seats(self) -> list[Seat]:
        """Who is where, in the order of the stages."""
        found = [Seat("select", "flow process", self.names[0], "", 0)]
        for stage in taking_part(self.config, self.config.imitates(self.plan.iteration)):
            if stage.makes != "plan":
                found += self._of(stage.name)
        return found

    def _of(self, stage: str) -> Iterator[Seat]:
        threads = self.deployment(stage).threads
        played = stage in PLAYED
        for member, group in enumerate(self.places(stage)):
            ranks = enumerate(group)
            for place, alike in itertools.groupby(ranks, key=lambda item: item[1]):
                numbers = [rank for rank, _ in alike]
                who = f"engine {member}" if played else _span("rank", numbers)
                host, share = place
                yield Seat(stage, who, self.names[host], _words(share), threads)
                if played:
                    yield from self._hosts_of_environments(stage, member, self.names[host])
        if stage == "reward" and self.config.reward.functions:
            who = f"{_processes(self.config.reward.hosts)} of reward functions for each rank"
            for host in dict.fromkeys(self.hosts_of(stage)):
                yield Seat(stage, who, host, "", 0)

    def _hosts_of_environments(self, stage: str, member: int, host: str) -> Iterator[Seat]:
        for label, played in self.config.played.items():
            what = f"environment {label}" if label else "the environment"
            who = f"{_processes(played.hosts)} of {what}, for engine {member}"
            yield Seat(stage, who, host, "", 0)


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _span(what: str, numbers: Sequence[int]) -> str:
    """Such as `rank 0` or `ranks 0-3`."""
    first, last = numbers[0], numbers[-1]
    return f"{what} {first}" if first == last else f"{what}s {first}-{last}"


def _words(share: Assignment) -> str:
    if share.gpus:
        return _span("GPU", share.gpus)
    return _span("core", share.cores) if share.cores else "any core"
