"""Numbers about played episodes: metrics for people, statistics for the selector."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from earl_core.rollout.load_meter import LoadMeter
from earl_core.trajectory.samples import Episode, Sample

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


def outcome_counts(episodes: Sequence[Episode]) -> dict[str, int]:
    """How often each `info["outcome"]` occurred; game outcomes in their usual order."""
    counts = Counter(str(e.info["outcome"]) for e in episodes if "outcome" in e.info)
    ordered = GAME_OUTCOMES if any(name in counts for name in GAME_OUTCOMES) else ()
    names = [*ordered, *sorted(set(counts) - set(ordered))]
    return {name: counts[name] for name in names}


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Returns, outcomes, turns, contexts (tokens) and finish reasons of unfailed episodes."""
    total = max(len(episodes), 1)
    returns = np.array([episode.total_reward for episode in episodes] or [0.0])
    turns = np.array([episode.turns for episode in episodes] or [0])
    samples = sum(len(episode.samples) for episode in episodes)
    answered = sum(sample.trained_tokens for episode in episodes for sample in episode.samples)
    metrics = {
        "episodes": float(len(episodes)),
        "samples_per_episode": samples / total,
        "return/mean": float(returns.mean()),
        "return/std": float(returns.std()),
        "turns/mean": float(turns.mean()),
        "turns/max": float(turns.max()),
        "tokens_per_turn": answered / max(float(turns.sum()), 1.0),
        **_context_metrics(episodes),
    }
    for name, count in outcome_counts(episodes).items():
        metrics[f"outcome/{name}"] = count / total
    for reason, count in sorted(Counter(e.finish_reason for e in episodes).items()):
        metrics[f"finish/{reason}"] = count / total
    return metrics | _environment_metrics(episodes)


def rollout_metrics(
    episodes: Sequence[Episode], meter: LoadMeter, peak_memory_bytes: float
) -> dict[str, float]:
    """`episode_metrics` plus what the rollout took: seconds, tokens, tokens/s, memory (bytes)."""
    return {
        **episode_metrics(episodes),
        "episodes_failed": float(meter.episodes_failed),
        "generated_tokens": float(meter.generated_tokens),
        "prompt_tokens": float(meter.prompt_tokens),
        "tokens_per_second": meter.tokens_per_second,
        "seconds": meter.seconds,
        "environment_seconds": meter.environment_share * meter.seconds,
        "environment_share": meter.environment_share,
        "peak_memory_bytes": float(peak_memory_bytes),
    }


def selector_statistics(
    episodes: Sequence[Episode], meter: LoadMeter, peak_memory_bytes: float
) -> dict[str, float]:
    """What the selector wants to know: contexts and live tokens in tokens, waits in seconds."""
    contexts = _context_metrics(episodes)
    turns = [episode.turns for episode in episodes] or [0]
    return {
        "context_mean": contexts["context/mean"],
        "context_p95": contexts["context/p95"],
        "context_max": contexts["context/max"],
        "running_requests_mean": meter.running_mean,
        "running_requests_max": float(meter.running_max),
        "live_tokens_max": float(meter.live_tokens_max),
        "turns_mean": float(np.mean(turns)),
        "tool_wait_seconds": meter.environment_wait / max(meter.environment_steps, 1),
        "tokens_per_second": meter.tokens_per_second,
        "peak_memory_bytes": float(peak_memory_bytes),
    }


def evaluation_results(episodes: Sequence[Episode]) -> dict[str, dict[str, float]]:
    """For each outcome its count, share and 95 % Wilson interval (`low`, `high`)."""
    results = {}
    for name, count in outcome_counts(episodes).items():
        low, high = wilson_interval(count, len(episodes))
        share = count / max(len(episodes), 1)
        results[name] = {"count": count, "share": share, "low": low, "high": high}
    return results


def example(episode: Episode) -> dict[str, Any]:
    """An episode as a readable transcript, JSON."""
    return {
        "episode_id": episode.episode_id,
        "prompt_id": episode.prompt_id,
        "turns": episode.info.get("transcript", []),
        "closing": episode.info.get("closing", ""),
        "outcome": episode.info.get("outcome", ""),
        "return": episode.total_reward,
        "finish_reason": episode.finish_reason,
    }


def peak_memory_bytes(pids: Sequence[int]) -> int:
    """Sum of the processes' peak resident memory; processes that are gone count nothing."""
    return sum(_peak_of(pid) for pid in pids)


def _peak_of(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _context_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    contexts = np.array([episode.context_tokens for episode in episodes] or [0])
    metrics = {
        "context/mean": float(contexts.mean()),
        "context/p95": float(np.percentile(contexts, 95)),
        "context/max": float(contexts.max()),
    }
    by_turn: list[list[int]] = []
    for episode in episodes:
        for turn, context in enumerate(_contexts_by_turn(episode.samples)):
            if turn == len(by_turn):
                by_turn.append([])
            by_turn[turn].append(context)
    for turn, values in enumerate(by_turn[:_TURNS_SHOWN], start=1):
        metrics[f"context_by_turn/{turn:02d}"] = float(np.mean(values))
    return metrics


def _contexts_by_turn(samples: Sequence[Sample]) -> list[int]:
    """Tokens that stand in the sample after each turn's answer."""
    ends: list[int] = []
    for sample in samples:
        ends.extend(sample.turn_starts[1:])
        if sample.turn_starts:
            ends.append(len(sample.tokens))
    return ends


def _environment_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for episode in episodes:
        metrics = episode.info.get("metrics")
        if isinstance(metrics, dict):
            for name, value in metrics.items():
                values.setdefault(str(name), []).append(float(value))
    return {f"environment/{name}": float(np.mean(v)) for name, v in sorted(values.items())}
