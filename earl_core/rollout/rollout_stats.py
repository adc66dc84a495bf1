"""Counts and sums of played episodes, and the metrics and statistics that follow from them.

Means, percentiles and shares cannot be added up; the counts and sums behind them can. Every number
about a rollout follows from a `RolloutStats`, so that none depends on how many engines played, or
on episodes that had to be played again. An engine's worker counts; the controller merges.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import zip_longest
from typing import Any

import numpy as np
from pydantic import BaseModel, Field

from earl_core.algorithms.moments import Moments
from earl_core.environments.real_numbers import invalid_rewards
from earl_core.rollout.errors import RolloutFailed
from earl_core.rollout.rollout_load import RolloutLoad
from earl_core.trajectory.samples import Episode, transcript

Pair = list[float]
"""[sum, count]."""

_REASONS_KEPT = 16
_REASON_CHARACTERS = 400


class RolloutStats(BaseModel):
    """Statistics of unfailed episodes, except `failed` and `failures`, which maps why episodes
    failed to how often; a rank tells the most frequent only. Histograms map a value to how often it
    occurred.

    samples, answered_tokens, contexts and turns: of each episode's own side, also where its
    opponent is trained, too. context_by_turn: the tokens that stand after each turn.
    environment: the environment's own metrics. passes: of a suite, see `pass_rates`. parts: of each
    environment, by its label, where the run has several; without load.
    """

    episodes: int = 0
    failed: int = 0
    failures: dict[str, int] = Field(default_factory=dict)
    samples: int = 0
    answered_tokens: int = 0
    returns: Moments = Moments()
    contexts: dict[int, int] = Field(default_factory=dict)
    turns: dict[int, int] = Field(default_factory=dict)
    context_by_turn: list[Pair] = Field(default_factory=list)
    outcomes: dict[str, int] = Field(default_factory=dict)
    finishes: dict[str, int] = Field(default_factory=dict)
    environment: dict[str, Pair] = Field(default_factory=dict)
    passes: dict[str, int] = Field(default_factory=dict)
    parts: dict[str, RolloutStats] = Field(default_factory=dict)
    load: RolloutLoad = Field(default_factory=RolloutLoad)

    @classmethod
    def of(cls, played: Sequence[Episode], load: RolloutLoad) -> RolloutStats:
        """Compute the statistics of one rollout's episodes, the failed ones included, and of their
        load."""
        parts: dict[str, list[Episode]] = {}
        for episode in played:
            parts.setdefault(episode.environment, []).append(episode)
        whole = cls._of(played, load)
        if list(parts) != [""]:
            whole.parts = {label: cls._of(part, RolloutLoad()) for label, part in parts.items()}
        return whole

    @classmethod
    def _of(cls, played: Sequence[Episode], load: RolloutLoad) -> RolloutStats:
        episodes = [episode for episode in played if not episode.failed]
        reasons = Counter(_reason(episode) for episode in played if episode.failed)
        samples = [sample for episode in episodes for sample in episode.own]
        returns = [episode.total_reward for episode in episodes]
        return cls(
            episodes=len(episodes),
            failed=len(played) - len(episodes),
            failures=dict(reasons.most_common(_REASONS_KEPT)),
            samples=len(samples),
            answered_tokens=sum(sample.trained_tokens for sample in samples),
            returns=Moments.from_values(returns),
            contexts=Counter(episode.context_tokens for episode in episodes),
            turns=Counter(episode.turns for episode in episodes),
            context_by_turn=reduce(_added, map(_contexts_by_turn, episodes), []),
            outcomes=_outcomes(episodes),
            finishes=Counter(episode.finish_reason for episode in episodes),
            environment=reduce(_added, map(_environment, episodes), {}),
            load=load,
        )


def merge(engines: Iterable[Sequence[RolloutStats]]) -> RolloutStats:
    """One tally of what several engines played. engines: for each the tallies of its calls, in
    their order."""
    total, load = RolloutStats(), RolloutLoad()
    for calls in engines:
        counts = (tally.model_copy(update={"load": RolloutLoad()}) for tally in calls)
        total = reduce(_added, counts, total)
        load = load.beside(reduce(RolloutLoad.then, (tally.load for tally in calls), RolloutLoad()))
    return total.model_copy(update={"load": load})


def _added(one: Any, other: Any) -> Any:
    """Two numbers or sets of numbers as one; of mappings, lists and tallies part by part."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, Moments):
        return one.merge(other)
    if isinstance(one, RolloutLoad):
        return one.then(other)
    if isinstance(one, dict):
        return {key: _added(one.get(key), other.get(key)) for key in {**one, **other}}
    if isinstance(one, list):
        return [_added(*parts) for parts in zip_longest(one, other)]
    if isinstance(one, RolloutStats):
        return RolloutStats(**_added(dict(one), dict(other)))
    return one + other


def _reason(episode: Episode) -> str:
    """The last line of a traceback or of a host's log says what went wrong."""
    lines = str(episode.info.get("failure", "")).strip().splitlines() or [""]
    return f"{episode.finish_reason}: {lines[-1].strip()[:_REASON_CHARACTERS]}"


def _outcomes(episodes: Sequence[Episode]) -> dict[str, int]:
    """Count each outcome; zero where the environment names it and it did not occur."""
    named: dict[str, int] = {}
    for episode in episodes:
        listed = episode.info.get("outcomes")
        named |= {str(name): 0 for name in listed} if isinstance(listed, list) else {}
    return named | Counter(str(e.info["outcome"]) for e in episodes if "outcome" in e.info)


def _contexts_by_turn(episode: Episode) -> list[Pair]:
    """Tokens that stand in the sample after each turn's answer."""
    ends: list[int] = []
    for sample in episode.own:
        ends += [*sample.turn_starts[1:], len(sample.tokens)] if sample.turn_starts else []
    return [[float(end), 1.0] for end in ends]


def _environment(episode: Episode) -> dict[str, Pair]:
    metrics = episode.info.get("metrics")
    named = metrics.items() if isinstance(metrics, dict) else ()
    return {str(name): [float(value), 1.0] for name, value in named}


GAME_OUTCOMES = ("win", "draw", "loss", "illegal")
"""They stand first, in this order."""

_TURNS_SHOWN = 32
_Z95 = 1.959963984540054


def wilson_interval(count: float, total: int) -> tuple[float, float]:
    """95 % score interval of a share (Wilson 1927); (0, 1) when nothing was counted."""
    if total == 0:
        return 0.0, 1.0
    share, z2 = count / total, _Z95**2
    center = (share + z2 / (2 * total)) / (1 + z2 / total)
    spread = share * (1 - share) / total + z2 / (4 * total**2)
    half = _Z95 * math.sqrt(spread) / (1 + z2 / total)
    return max(0.0, center - half), min(1.0, center + half)


def outcome_counts(tally: RolloutStats) -> dict[str, int]:
    """Count each outcome of the environment; those of games in their usual order."""
    counts = tally.outcomes
    first = [name for name in GAME_OUTCOMES if name in counts]
    return {name: counts[name] for name in [*first, *sorted(counts.keys() - set(first))]}


def rollout_metrics(tally: RolloutStats) -> dict[str, float]:
    """Returns, outcomes, turns, contexts (tokens) and finish reasons of the unfailed episodes, and
    what the rollout took: seconds, tokens, tokens/s, memory (bytes)."""
    total = max(tally.episodes, 1)
    metrics = {
        **shape_metrics(tally),
        "return/mean": tally.returns.mean,
        "return/std": tally.returns.std(),
    }
    for name, count in outcome_counts(tally).items():
        metrics[f"outcome/{name}"] = count / total
    for reason, count in sorted(tally.finishes.items()):
        metrics[f"finish/{reason}"] = count / total
    for name, (value, times) in sorted(tally.environment.items()):
        metrics[f"environment/{name}"] = value / times
    for label, part in sorted(tally.parts.items()):
        metrics |= _part_metrics(label, part)
    return metrics | _load_metrics(tally)


def shape_metrics(tally: RolloutStats) -> dict[str, float]:
    """Count the unfailed episodes, their samples, turns and contexts (tokens)."""
    total = max(tally.episodes, 1)
    turns = sum(value * count for value, count in tally.turns.items())
    return {
        "episodes": float(tally.episodes),
        "samples_per_episode": tally.samples / total,
        # Of answers to a conversation that does not go on where another one stood.
        "new_sample_share": (tally.samples - tally.episodes) / max(turns, 1),
        "turns/mean": turns / total,
        "turns/max": float(max(tally.turns, default=0)),
        "tokens_per_turn": tally.answered_tokens / max(float(turns), 1.0),
        **_context_metrics(tally),
    }


def _part_metrics(label: str, part: RolloutStats) -> dict[str, float]:
    """One environment of several."""
    total = max(part.episodes, 1)
    turns = sum(value * count for value, count in part.turns.items())
    own = {
        "episodes": float(part.episodes),
        "episodes_failed": float(part.failed),
        "return/mean": part.returns.mean,
        "return/std": part.returns.std(),
        "turns/mean": turns / total,
        "context/mean": float(_expanded(part.contexts).mean()),
        **{f"outcome/{name}": count / total for name, count in outcome_counts(part).items()},
    }
    return {f"of/{label}/{name}": value for name, value in own.items()}


def _load_metrics(tally: RolloutStats) -> dict[str, float]:
    load, rare = tally.load, {}
    if load.tool_calls or load.tool_errors:
        rare = {
            "tool_calls": float(load.tool_calls),
            "tool_errors": float(load.tool_errors),
            "tool_seconds": load.tool_share * load.seconds,
        }
    for name in (
        "calls_timed_out",
        "answers_from_elsewhere",
        "constrained_calls",
        "opponent_calls",
        "opponent_tokens",
        "opponent_samples_unpaid",
    ):
        if count := getattr(load, name):
            rare[name] = float(count)
    if load.constrained_calls:
        rare["constrained_satisfied_share"] = load.constrained_satisfied / load.constrained_calls
    if load.drafted_passes:
        rare["draft_accepted_share"] = load.drafts_accepted / max(load.draft_tokens, 1)
        rare["tokens_per_pass"] = 1 + load.drafts_accepted / load.drafted_passes
    return rare | {
        "episodes_failed": float(tally.failed),
        "episodes_retried": float(load.episodes_retried),
        "generated_tokens": float(load.generated_tokens),
        "prompt_tokens": float(load.prompt_tokens),
        "tokens_per_second": load.tokens_per_second,
        "seconds": load.seconds,
        "environment_seconds": load.environment_share * load.seconds,
        "environment_share": load.environment_share,
        "peak_memory_bytes": float(load.peak_memory_bytes),
    }


def selector_statistics(tally: RolloutStats) -> dict[str, float]:
    """Return the statistics that the selector needs beside `rollout_metrics`: live tokens, waits in
    seconds.

    Running requests and live tokens are those of one engine: the mean over all, and the most.
    """
    load = tally.load
    waits = load.environment_wait + load.tool_wait
    return {
        "running_requests_mean": load.request_seconds / max(load.busy_seconds, 1e-9),
        "running_requests_max": float(load.running_max),
        "live_tokens_max": float(load.live_tokens_max),
        "tool_wait_seconds": waits / max(load.environment_steps, 1),
    }


def evaluation_results(tally: RolloutStats) -> dict[str, Any]:
    """`metrics`, and `outcomes`: of each its count, share and 95 % Wilson interval (`low`,
    `high`)."""
    results = {}
    for name, count in outcome_counts(tally).items():
        low, high = wilson_interval(count, tally.episodes)
        share = count / max(tally.episodes, 1)
        results[name] = {"count": count, "share": share, "low": low, "high": high}
    return {"outcomes": results, "metrics": rollout_metrics(tally)}


def check_failures(tally: RolloutStats, max_failed_share: float, spares: bool = False) -> None:
    """Raise `RolloutFailed` when no episode was played to its end, or too many failed. spares: not
    those whose reward was no number, as long as they are fewer than half."""
    failed, total = tally.failed, tally.failed + tally.episodes
    invalid = invalid_rewards(tally.failures) if spares else 0
    frequent = ""
    if tally.failures:
        reason, count = max(tally.failures.items(), key=lambda item: item[1])
        frequent = f" The most frequent failure ({count} of {failed}) is {reason}"
    if total and not tally.episodes:
        raise RolloutFailed(
            "every episode failed, so nothing is known of the policy: repair the environment."
            + frequent,
            payload={"failed": failed, "episodes": total, "reasons": tally.failures},
        )
    if 2 * invalid < total:
        failed -= invalid
    if failed > max_failed_share * total:
        raise RolloutFailed.too_many(failed, total, max_failed_share, tally.failures, frequent)


def example(episode: Episode) -> dict[str, Any]:
    """An episode as a readable transcript, JSON."""
    texts = [text for sample in episode.own for text in sample.texts]
    rewards = [reward for sample in episode.own for reward in sample.turn_rewards]
    return {
        "episode_id": episode.episode_id,
        "prompt_id": episode.prompt_id,
        **transcript(texts, rewards),
        "outcome": episode.info.get("outcome", ""),
        "return": episode.total_reward,
        "finish_reason": episode.finish_reason,
    }


def _context_metrics(tally: RolloutStats) -> dict[str, float]:
    values = _expanded(tally.contexts)
    metrics = {
        "context/mean": float(values.mean()),
        "context/p95": float(np.percentile(values, 95)),
        "context/max": float(values.max()),
    }
    for turn, (tokens, count) in enumerate(tally.context_by_turn[:_TURNS_SHOWN], start=1):
        metrics[f"context_by_turn/{turn:02d}"] = tokens / count
    return metrics


def _expanded(histogram: Mapping[int, int]) -> np.ndarray:
    ordered = sorted(histogram.items()) or [(0, 1)]
    return np.repeat([value for value, _ in ordered], [count for _, count in ordered])
