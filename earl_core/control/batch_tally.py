"""The figures of a batch of a stream: progress while it is collected, and metrics of its seal."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from earl_core.control.streamed_engine import StreamedEngine
from earl_core.rollout import rollout_stats
from earl_core.rollout.rollout_stats import RolloutStats, merge
from earl_core.run.group_journal import SealedGroup


class BatchTally:
    """The figures of one batch after the other. `lost`: engines that were. Not for several threads
    at a time.

    episodes: of a batch.
    """

    def __init__(self, episodes: int) -> None:
        self._episodes = episodes
        self._stats = RolloutStats()
        self._tokens = self.lost = 0
        self._probe: dict[str, float] = {}
        self._since: float | None = None

    def begin(self) -> None:
        """Begin to wait for a batch. Of engines that play on meanwhile its time begins at the end
        of the one before."""
        self._since = self._since or time.monotonic()

    def settle(self, sealed: Sequence[SealedGroup]) -> None:
        """Count what is sealed of the batch already."""
        self._stats, self._probe = merged(sealed), {}

    def took(self, sealed: Sequence[SealedGroup], now: Sequence[SealedGroup]) -> None:
        """Count groups that were sealed. now: those of the batch that is waited for."""
        self._tokens += merged(sealed).load.generated_tokens
        self._stats = merge([[self._stats, merged(now)]])

    def probed(self, found: Mapping[str, float]) -> None:
        """Keep the worst of what engines answered to the probe of their weights."""
        worst = self._probe
        worst |= {name: max(each, worst.get(name, each)) for name, each in found.items()}

    def progress(self, engines: int) -> dict[str, Any]:
        """Progress of the batch, for whoever watches the run."""
        seconds = 0.0 if self._since is None else time.monotonic() - self._since
        tokens = self._stats.load.generated_tokens
        return {
            "episodes_done": self._stats.episodes + self._stats.failed,
            "episodes": self._episodes,
            "tokens_per_second": tokens / seconds if seconds else 0.0,
            "return": self._stats.returns.mean,
            "engines": engines,
        }

    def end(self, groups: Sequence[SealedGroup], goes_on: bool) -> RolloutStats:
        """The statistics of a whole batch. goes_on: engines play for the next one already."""
        now, since = time.monotonic(), self._since
        self._since = now if goes_on else None
        stats = merged(groups)
        # A group's own seconds pass side by side with those of others, and its tokens may be of an
        # earlier iteration's time.
        seconds = 0.0 if since is None else now - since
        load = replace(stats.load, seconds=seconds, generated_tokens=self._tokens)
        self._tokens = 0
        return stats.model_copy(update={"load": load})

    def metrics(self, stats: RolloutStats, engines: Collection[StreamedEngine]) -> dict[str, float]:
        """The metrics of a batch, those of losses and memory since the last one."""
        lost, self.lost = self.lost, 0
        peak = sum(each.peak for each in engines)
        for each in engines:
            each.peak = 0.0
        return {
            **rollout_stats.rollout_metrics(stats),
            **self._probe,
            "replicas_lost": float(lost),
            "peak_bytes": float(peak),
        }


def merged(groups: Sequence[SealedGroup]) -> RolloutStats:
    """The statistics of groups together."""
    return merge([[RolloutStats.model_validate(each.tally) for each in groups]])
