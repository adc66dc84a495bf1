"""Small tensor helpers for log-ratios and per-episode sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Beyond e^20 a ratio says only "far off"; an infinite one times a zero gradient would be NaN.
LOG_RATIO_BOUND = 20.0


def episode_sum(values: Tensor, episode_index: Tensor, n_episodes: int) -> Tensor:
    """Sum of ``values`` [T] over each episode's tokens, [n_episodes], in their dtype."""
    return values.new_zeros(n_episodes).index_add(0, episode_index, values)


def episode_mean(values: Tensor, episode_index: Tensor, n_episodes: int) -> Tensor:
    """Mean of ``values`` [T] over each episode's tokens, [n_episodes]; 0 where there are none."""
    counts = episode_sum(values.new_ones(values.shape), episode_index, n_episodes)
    return episode_sum(values, episode_index, n_episodes) / counts.clamp(min=1.0)
