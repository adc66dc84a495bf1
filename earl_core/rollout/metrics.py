"""Numbers about played episodes: metrics for people, statistics for the selector."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from earl_core.rollout.errors import RolloutFailed
from earl_core.rollout.rollout_stats import RolloutStats
from earl_core.trajectory.samples import Episode, transcript

GAME_OUTCOMES = ("win", "draw", "loss", "illegal")
"""Reported together, zeros included, as soon as one of them occurs."""

_TURNS_SHOWN = 32
_Z95 = 1.959963984540054


def wilson_interval(count: int, total: int) -> tuple[float, float]:
    """95 % score interval of a share (Wilson 1927); (0, 1) when nothing was counted."""
    if total == 0:
        return 0.0, 1.0
    share, z2 = count / total, _Z95**2
    center = (share + z2 / (2 * total)) / (1 + z2 / total)
    spread = share * (1 - share) / total + z2 / (4 * total**2)
    half = _Z95 * math.sqrt(spread) / (1 + z2 / total)
    return max(0.0, center - half), min(1.0, center + half)


def outcome_counts(tally: RolloutStats) -> dict[str, int]:
    """How often each `info["outcome"]` occurred; game outcomes in their usual order."""
    counts = tally.outcomes
    ordered = GAME_OUTCOMES if any(name in counts for name in GAME_OUTCOMES) else ()
    names = [*ordered, *sorted(set(counts) - set(ordered))]
    return {name: counts.get(name, 0) for name in names}


def rollout_metrics(tally: RolloutStats) -> dict[str, float]:
    """Returns, outcomes, turns, contexts (tokens) and finish reasons of the unfailed episodes, and
    what the rollout took: seconds, tokens, tokens/s, memory (bytes)."""
    total = max(tally.episodes, 1)
    turns = sum(value * count for value, count in tally.turns.items())
    metrics = {
        "episodes": float(tally.episodes),
        "samples_per_episode": tally.samples / total,
        "return/mean": tally.returns.mean,
        "return/std": tally.returns.std(),
        "turns/mean": turns / total,
        "turns/max": float(max(tally.turns, default=0)),
        "tokens_per_turn": tally.answered_tokens / max(float(turns), 1.0),
        **_context_metrics(tally),
    }
    for name, count in outcome_counts(tally).items():
        metrics[f"outcome/{name}"] = count / total
    for reason, count in sorted(tally.finishes.items()):
        metrics[f"finish/{reason}"] = count / total
    for name, (value, times) in sorted(tally.environment.items()):
        metrics[f"environment/{name}"] = value / times
    return metrics | _load_metrics(tally)


def _load_metrics(tally: RolloutStats) -> dict[str, float]:
    load = tally.load
    return {
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
    """What the selector wants to know: contexts and live tokens in tokens, waits in seconds.

    Running requests and live tokens are those of one engine: the mean over all, and the most.
    """
    load, contexts = tally.load, _context_metrics(tally)
    turns = sum(value * count for value, count in tally.turns.items())
    return {
        "context_mean": contexts["context/mean"],
        "context_p95": contexts["context/p95"],
        "context_max": contexts["context/max"],
        "running_requests_mean": load.request_seconds / max(load.busy_seconds, 1e-9),
        "running_requests_max": float(load.running_max),
        "live_tokens_max": float(load.live_tokens_max),
        "turns_mean": turns / max(tally.episodes, 1),
        "tool_wait_seconds": load.environment_wait / max(load.environment_steps, 1),
        "tokens_per_second": load.tokens_per_second,
        "peak_memory_bytes": float(load.peak_memory_bytes),
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


def check_failures(tally: RolloutStats, max_failed_share: float) -> None:
    """Raise `RolloutFailed` when no episode was played to its end, or too many failed."""
    failed, total = tally.failed, tally.failed + tally.episodes
    frequent = ""
    if tally.failures:
        reason, count = max(tally.failures.items(), key=lambda item: item[1])
        frequent = f" The most frequent failure ({count} of {failed}) is {reason}"
    if total and not tally.episodes:
        raise RolloutFailed(
            "every episode failed, so there is nothing to learn from: repair the environment."
            + frequent,
            payload={"failed": failed, "episodes": total, "reasons": tally.failures},
        )
    if failed > max_failed_share * total:
        raise RolloutFailed.too_many(failed, total, max_failed_share, tally.failures, frequent)


def example(episode: Episode) -> dict[str, Any]:
    """An episode as a readable transcript, JSON."""
    texts = [text for sample in episode.samples for text in sample.texts]
    rewards = [reward for sample in episode.samples for reward in sample.turn_rewards]
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
