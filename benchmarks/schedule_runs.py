"""Runs as they were recorded, for the model of their schedules (`schedule_model`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from earl_core.config import RunConfig
from earl_core.run.episodes import NAME, read_samples
from earl_core.run.record import config_of_run, read_lines

FIRST = 2
"""The first measured iteration; workers start in those before."""
_STAGES = ("reward", "reference", "advantage", "update", "publish")


@dataclass(frozen=True)
class Played:
    """An iteration of a run. groups: for each, (tokens, turns) of its episodes. wall: seconds from
    the end of the iteration before. trained: tokens. stages: seconds."""

    groups: list[list[tuple[int, int]]]
    wall: float
    trained: float
    stages: dict[str, float]

    @property
    def learning(self) -> float:
        """Seconds of the stages after the rollout."""
        return sum(self.stages[name] for name in _STAGES)


@dataclass(frozen=True)
class Run:
    """A run as it was recorded. played: by iteration."""

    name: str
    config: RunConfig
    played: list[Played]

    @property
    def staleness(self) -> int:
        """In versions."""
        return self.config.schedule.staleness

    @property
    def kind(self) -> tuple[str, str]:
        """Runs of a kind have rates in common: what is played, and the engine."""
        return ", ".join(
            each.played for each in self.config.played.values()
        ), self.config.rollout.engine

    @property
    def engines(self) -> int:
        """Their number."""
        return self.config.stages.rollout.replicas if self.config.stages.rollout else 1

    @property
    def schedule(self) -> str:
        """For people."""
        if not self.staleness:
            return "synchronous"
        place = self.config.stages.placement or "colocated"
        return f"{self.config.schedule.mode} {self.staleness}, {place}"

    @property
    def seconds(self) -> float:
        """Of an iteration."""
        measured = [each.wall for each in self.played[FIRST:]]
        return sum(measured) / len(measured)


def read_run(path: Path) -> Run:
    """Read what a run has recorded of its iterations."""
    config = config_of_run(path)
    lines = {line["iteration"]: line for line in read_lines(path / "metrics.jsonl")}
    played = []
    for number in sorted(lines):
        line = lines[number]
        stages = {
            name: float(line.get(f"{name}/stage_seconds", 0.0)) for name in ("rollout", *_STAGES)
        }
        stages["playing"] = float(line.get("rollout/seconds", 0.0))
        wall = line["time"] - lines[number - 1]["time"] if number else 0.0
        groups = _groups(path / "iterations" / f"{number:06d}" / NAME, config)
        played.append(Played(groups, wall, line["update/tokens_trained"], stages))
    return Run(path.name, config, played)


def _groups(path: Path, config: RunConfig) -> list[list[tuple[int, int]]]:
    table = read_samples(path, columns=["group_id", "turns", "loss_mask"])
    tokens = [int(sum(row)) for row in table["loss_mask"].to_pylist()]
    episodes: dict[int, tuple[int, int, int]] = {}
    rows = zip(
        table["episode_id"].to_pylist(),
        table["group_id"].to_pylist(),
        tokens,
        table["turns"].to_pylist(),
        strict=True,
    )
    for episode, group, sampled, turns in rows:
        _, before, taken = episodes.get(episode, (group, 0, 0))
        episodes[episode] = group, before + sampled, taken + turns
    found: dict[int, list[tuple[int, int]]] = {}
    for group, sampled, turns in episodes.values():
        found.setdefault(group, []).append((sampled, turns))
    return [found[group] for group in sorted(found)]
