"""Counts and sums of played episodes: what several engines' results are made one of.

Means, percentiles and shares cannot be added up, what they are made of can. Every number about a
rollout follows from a `RolloutStats`, so that none depends on how many engines played, or on
episodes that had to be played again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from earl_core.algorithms.moments import Moments
from earl_core.rollout.load_meter import LoadMeter
from earl_core.trajectory.samples import Episode, Sample

Pairs = dict[str, list[float]]
"""Name to [sum, count]."""

_REASONS_KEPT = 16
_REASON_CHARACTERS = 400


@dataclass
class RolloutLoad:
    """What the episodes kept busy and cost, as a `LoadMeter` counts it. Seconds, tokens, bytes."""

    seconds: float = 0.0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    generation_wait: float = 0.0
    environment_wait: float = 0.0
    environment_steps: int = 0
    episodes_played_anew: int = 0
    request_seconds: float = 0.0
    busy_seconds: float = 0.0
    running_max: int = 0
    live_tokens_max: int = 0
    peak_memory_bytes: int = 0

    @classmethod
    def of(cls, meter: LoadMeter, peak_memory_bytes: int) -> RolloutLoad:
        """From a meter whose rollout has ended."""
        taken = {f.name: getattr(meter, f.name) for f in fields(cls) if hasattr(meter, f.name)}
        return cls(**taken, peak_memory_bytes=peak_memory_bytes)

    def then(self, other: RolloutLoad) -> RolloutLoad:
        """What one engine did in two calls, one after the other."""
        peaks = ("running_max", "live_tokens_max", "peak_memory_bytes")
        return self._joined(other, peaks)

    def beside(self, other: RolloutLoad) -> RolloutLoad:
        """What two engines did at the same time. The most requests and live tokens are those of
        one engine, for they fill one engine's memory."""
        return self._joined(other, ("seconds", "running_max", "live_tokens_max"))

    def _joined(self, other: RolloutLoad, largest: Sequence[str]) -> RolloutLoad:
        mine, theirs = asdict(self), asdict(other)
        joined = {
            name: max(value, theirs[name]) if name in largest else value + theirs[name]
            for name, value in mine.items()
        }
        return RolloutLoad(**joined)


@dataclass
class RolloutStats:
    """Of unfailed episodes, except `failed` and `failures`, which maps why episodes failed to how
    often; a rank tells the most frequent only. Histograms map a value to how often it occurred.

    contexts and turns: of each episode. context_by_turn: [sum, count] of the tokens that stand
    after each turn. environment: sums of the environment's own metrics.
    """

    episodes: int = 0
    failed: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    samples: int = 0
    answered_tokens: int = 0
    returns: Moments = field(default_factory=Moments)
    contexts: dict[int, int] = field(default_factory=dict)
    turns: dict[int, int] = field(default_factory=dict)
    context_by_turn: list[list[float]] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    finishes: dict[str, int] = field(default_factory=dict)
    environment: Pairs = field(default_factory=dict)
    load: RolloutLoad = field(default_factory=RolloutLoad)

    @classmethod
    def of(
        cls,
        episodes: Sequence[Episode],
        meter: LoadMeter,
        peak_memory_bytes: int,
        failed: Iterable[Episode] = (),
    ) -> RolloutStats:
        """Of one rollout's unfailed episodes, and why others failed; the meter counts both."""
        samples = [sample for episode in episodes for sample in episode.samples]
        return cls(
            episodes=len(episodes),
            failed=meter.episodes_failed,
            failures=dict(Counter(_reason(e) for e in failed).most_common(_REASONS_KEPT)),
            samples=len(samples),
            answered_tokens=sum(sample.trained_tokens for sample in samples),
            returns=Moments.from_values([episode.total_reward for episode in episodes]),
            contexts=dict(Counter(episode.context_tokens for episode in episodes)),
            turns=dict(Counter(episode.turns for episode in episodes)),
            context_by_turn=_context_by_turn(episodes),
            outcomes=dict(Counter(str(e.info["outcome"]) for e in episodes if "outcome" in e.info)),
            finishes=dict(Counter(str(episode.finish_reason) for episode in episodes)),
            environment=_environment(episodes),
            load=RolloutLoad.of(meter, peak_memory_bytes),
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON object; keys of histograms become text."""
        dumped = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("contexts", "turns"):
            dumped[name] = {str(value): count for value, count in dumped[name].items()}
        return {**dumped, "returns": self.returns.to_json(), "load": asdict(self.load)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RolloutStats:
        """Inverse of `to_json`."""
        given = dict(data)
        for name in ("contexts", "turns"):
            given[name] = {int(value): int(count) for value, count in given[name].items()}
        given["returns"] = Moments.from_json(given["returns"])
        return cls(**{**given, "load": RolloutLoad(**given["load"])})


def merge(engines: Iterable[Sequence[RolloutStats]]) -> RolloutStats:
    """One tally of what several engines played. engines: for each the tallies of its calls, in
    their order."""
    total, loads = RolloutStats(), []
    for calls in engines:
        load = RolloutLoad()
        for tally in calls:
            total = _added(total, tally)
            load = load.then(tally.load)
        if calls:
            loads.append(load)
    for load in loads:
        total.load = total.load.beside(load)
    return total


def _added(first: RolloutStats, second: RolloutStats) -> RolloutStats:
    return RolloutStats(
        episodes=first.episodes + second.episodes,
        failed=first.failed + second.failed,
        failures=_counted(first.failures, second.failures),
        samples=first.samples + second.samples,
        answered_tokens=first.answered_tokens + second.answered_tokens,
        returns=first.returns.merge(second.returns),
        contexts=_counted(first.contexts, second.contexts),
        turns=_counted(first.turns, second.turns),
        context_by_turn=_paired(first.context_by_turn, second.context_by_turn),
        outcomes=_counted(first.outcomes, second.outcomes),
        finishes=_counted(first.finishes, second.finishes),
        environment={
            name: _pair(first.environment.get(name), second.environment.get(name))
            for name in {**first.environment, **second.environment}
        },
    )


def _reason(episode: Episode) -> str:
    """The last line of a traceback or of a host's log says what went wrong."""
    lines = str(episode.info.get("failure", "")).strip().splitlines() or [""]
    return f"{episode.finish_reason}: {lines[-1].strip()[:_REASON_CHARACTERS]}"


def _counted(first: dict[Any, int], second: dict[Any, int]) -> dict[Any, int]:
    return dict(Counter(first) + Counter(second))


def _paired(first: list[list[float]], second: list[list[float]]) -> list[list[float]]:
    longest = max(len(first), len(second))
    return [_pair(*(part[k] if k < len(part) else None for part in (first, second)))
            for k in range(longest)]  # fmt: skip


def _pair(first: list[float] | None, second: list[float] | None) -> list[float]:
    (a, b), (c, d) = first or [0.0, 0.0], second or [0.0, 0.0]
    return [a + c, b + d]


def _context_by_turn(episodes: Sequence[Episode]) -> list[list[float]]:
    by_turn: list[list[float]] = []
    for episode in episodes:
        for turn, context in enumerate(_contexts_by_turn(episode.samples)):
            if turn == len(by_turn):
                by_turn.append([0.0, 0.0])
            by_turn[turn][0] += context
            by_turn[turn][1] += 1
    return by_turn


def _contexts_by_turn(samples: Sequence[Sample]) -> list[int]:
    """Tokens that stand in the sample after each turn's answer."""
    ends: list[int] = []
    for sample in samples:
        ends.extend(sample.turn_starts[1:])
        if sample.turn_starts:
            ends.append(len(sample.tokens))
    return ends


def _environment(episodes: Sequence[Episode]) -> Pairs:
    sums: Pairs = {}
    for episode in episodes:
        metrics = episode.info.get("metrics")
        for name, value in metrics.items() if isinstance(metrics, dict) else ():
            sums[str(name)] = _pair(sums.get(str(name)), [float(value), 1.0])
    return sums
