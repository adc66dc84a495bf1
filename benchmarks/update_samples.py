"""Recorded episodes as the learner's training samples."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.update_episodes import RecordedEpisode
from earl_core.learner.data.packing import TrainingSample


def training_samples(episodes: Sequence[RecordedEpisode]) -> list[TrainingSample]:
    """One sample for each recorded episode."""
    return [
        TrainingSample(
            tokens=episode.tokens,
            loss_mask=episode.loss_mask,
            rollout_logprobs=episode.rollout_logprobs,
            advantages=episode.advantages,
            episode_id=episode.episode_id,
            group_id=episode.group_id,
            sample_id=number,
        )
        for number, episode in enumerate(episodes)
    ]
