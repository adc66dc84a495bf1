"""Load and cost of episodes while they are played: waits, tokens, memory, progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from earl_core.rollout.engines.engine import Completion

_PROGRESS_SECONDS = 0.3


@dataclass
class RolloutLoad:
    """Load and cost of episodes. Seconds, tokens, bytes.

    Waits are summed over episodes: a lockstep turn of n episodes that takes s seconds counts
    n * s, so that shares mean the same under both schedules. Tool errors: calls not read, refused
    or raising. Calls timed out: of agents to the gateway. Constrained: calls that ask for
    answers of a form, and answers that have it. Answers from elsewhere: that agents go on after and
    have not asked for, but others have. Opponent tokens: of the generated ones,
    those that are not trained on because the policy said them as its own opponent. Opponent samples
    unpaid: those left out because no reward of theirs was told. Drafted passes: those of answers
    that may have drafts, each counted for its sequence.
    """

    seconds: float = 0.0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    generation_wait: float = 0.0
    environment_wait: float = 0.0
    environment_steps: int = 0
    tool_wait: float = 0.0
    tool_calls: int = 0
    tool_errors: int = 0
    episodes_retried: int = 0
    calls_timed_out: int = 0
    constrained_calls: int = 0
    constrained_satisfied: int = 0
    answers_from_elsewhere: int = 0
    opponent_calls: int = 0
    opponent_tokens: int = 0
    opponent_samples_unpaid: int = 0
    drafted_passes: int = 0
    draft_tokens: int = 0
    drafts_accepted: int = 0
    request_seconds: float = 0.0
    busy_seconds: float = 0.0
    running_max: int = 0
    live_tokens_max: int = 0
    peak_memory_bytes: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens over wall time."""
        return self.generated_tokens / max(self.seconds, 1e-9)

    @property
    def environment_share(self) -> float:
        """Share of the episodes' waiting that was for environments rather than for the engine."""
        return self._share(self.environment_wait)

    @property
    def tool_share(self) -> float:
        """The same of waiting for tools."""
        return self._share(self.tool_wait)

    def _share(self, wait: float) -> float:
        waits = self.environment_wait + self.tool_wait + self.generation_wait
        return wait / waits if waits > 0 else 0.0

    def then(self, other: RolloutLoad) -> RolloutLoad:
        """Join the loads of one engine in two calls, one after the other."""
        return self._joined(other, "running_max", "live_tokens_max", "peak_memory_bytes")

    def beside(self, other: RolloutLoad) -> RolloutLoad:
        """Join the loads of two engines at the same time. The most requests and live tokens are
        those of one engine, because they fill one engine's memory."""
        return self._joined(other, "seconds", "running_max", "live_tokens_max")

    def _joined(self, other: RolloutLoad, *largest: str) -> RolloutLoad:
        mine, theirs = asdict(self), asdict(other)
        return RolloutLoad(
            **{
                name: max(value, theirs[name]) if name in largest else value + theirs[name]
                for name, value in mine.items()
            }
        )


class LoadMeter(RolloutLoad):
    """The load of one rollout while it runs, updated by the agent loop; all methods are O(1).

    report: gets the progress as JSON, a few times a second at most. `seconds` is 0 until `end`.
    """

    def __init__(
        self, episodes: int, report: Callable[[dict[str, Any]], None] = lambda _: None
    ) -> None:
        super().__init__()
        self.episodes = episodes
        self.episodes_done = 0
        self.episodes_failed = 0
        self.reward_total = 0.0
        self._live_tokens = 0
        self._running = 0
        self._report = report
        self._report_due = 0.0
        self._started = self._changed = time.perf_counter()

    def answered(self, completion: Completion) -> None:
        """An answer was sampled."""
        self.generated_tokens += len(completion.tokens)
        self.drafted_passes += completion.drafts.passes
        self.draft_tokens += completion.drafts.tokens
        self.drafts_accepted += completion.drafts.accepted

    def requests_running(self, change: int) -> None:
        """So many more requests are in the engine; negative when they came back."""
        now = time.perf_counter()
        if self._running:
            self.request_seconds += self._running * (now - self._changed)
            self.busy_seconds += now - self._changed
        self._changed = now
        self._running += change
        self.running_max = max(self.running_max, self._running)

    def tokens_live(self, change: int) -> None:
        """The contexts of the live episodes grew (or, when one ends, shrank) by `change` tokens."""
        self._live_tokens += change
        self.live_tokens_max = max(self.live_tokens_max, self._live_tokens)

    def progressed(self, last: bool = False) -> None:
        """Report how far the rollout is, unless that was just done; the last time always."""
        now = time.perf_counter()
        if now < self._report_due and not last:
            return
        self._report_due = now + _PROGRESS_SECONDS
        played = self.episodes_done - self.episodes_failed
        self._report(
            {
                "episodes_done": self.episodes_done,
                "episodes": self.episodes,
                "tokens_per_second": self.generated_tokens / max(now - self._started, 1e-9),
                "return": self.reward_total / max(played, 1),
            }
        )

    def end(self) -> None:
        """Stop the clock."""
        self.requests_running(0)
        self.seconds = time.perf_counter() - self._started
