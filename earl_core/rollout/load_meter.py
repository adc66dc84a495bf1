"""What a rollout keeps busy while it runs: requests, live tokens, waits."""

from __future__ import annotations

import time


class LoadMeter:
    """Counters of one rollout, updated by the agent loop; all methods are O(1).

    Waits are summed over episodes: a lockstep turn of n episodes that takes s seconds counts
    n * s, so that shares mean the same under both schedules.
    """

    def __init__(self, episodes: int) -> None:
        self.episodes = episodes
        self.episodes_done = 0
        self.episodes_failed = 0
        self.episodes_played_anew = 0
        self.reward_total = 0.0
        self.generated_tokens = 0
        self.prompt_tokens = 0
        self.generation_wait = 0.0
        self.environment_wait = 0.0
        self.environment_steps = 0
        self.running_max = 0
        self.live_tokens_max = 0
        self._live_tokens = 0
        self._running = 0
        self.request_seconds = 0.0
        self.busy_seconds = 0.0
        self._started = self._changed = time.perf_counter()
        self._ended: float | None = None

    def requests_began(self, count: int) -> None:
        """`count` requests went to the engine."""
        self._account()
        self._running += count
        self.running_max = max(self.running_max, self._running)

    def requests_ended(self, count: int) -> None:
        """`count` requests came back, or were given up."""
        self._account()
        self._running -= count

    def tokens_live(self, change: int) -> None:
        """The contexts of the live episodes grew (or, when one ends, shrank) by `change` tokens."""
        self._live_tokens += change
        self.live_tokens_max = max(self.live_tokens_max, self._live_tokens)

    def end(self) -> None:
        """Stop the clock."""
        self._account()
        self._ended = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Wall time since the start, or until `end`."""
        return (self._ended or time.perf_counter()) - self._started

    @property
    def running_mean(self) -> float:
        """Requests in the engine, averaged over the time in which there were any."""
        return self.request_seconds / self.busy_seconds if self.busy_seconds > 0 else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens over wall time."""
        return self.generated_tokens / max(self.seconds, 1e-9)

    @property
    def environment_share(self) -> float:
        """Share of the episodes' waiting that was for environments rather than for the engine."""
        waits = self.environment_wait + self.generation_wait
        return self.environment_wait / waits if waits > 0 else 0.0

    def _account(self) -> None:
        now = time.perf_counter()
        if self._running:
            self.request_seconds += self._running * (now - self._changed)
            self.busy_seconds += now - self._changed
        self._changed = now
