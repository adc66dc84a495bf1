"""The recorded episodes of the update's benchmark, and the conversations made of them."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.update_episodes import EPISODES, conversations, read_episodes, workload


def test_the_committed_episodes_are_small_and_whole() -> None:
    assert EPISODES.stat().st_size < 300_000
    episodes = read_episodes()
    assert len(episodes) == 48
    for episode in episodes:
        assert episode.turn_starts[0] == 0
        assert sum(turn.stop - turn.start for turn in episode.turns()) == len(episode)
        assert episode.loss_mask.any()
        assert not episode.loss_mask[0]
        assert not episode.advantages[episode.loss_mask == 0].any()
    sizes = [len([e for e in episodes if e.group_id == g]) for g in {e.group_id for e in episodes}]
    assert sizes == [4] * 12
    assert len({len(episode) for episode in episodes}) > 5


@pytest.mark.parametrize("tokens", [700, 4096])
def test_a_conversation_is_recorded_turns_one_after_another(tokens: int) -> None:
    episodes = read_episodes()
    first, second = conversations(episodes, tokens, 2)
    assert tokens <= len(first) < tokens + max(map(len, episodes))
    assert len(first.turn_starts) > 1
    begin = np.concatenate([episodes[0].tokens, episodes[1].tokens])
    np.testing.assert_array_equal(first.tokens[: len(begin)], begin)
    np.testing.assert_array_equal(second.tokens[: len(episodes[24])], episodes[24].tokens)
    assert len(first.loss_mask) == len(first.advantages) == len(first)


def test_a_workload_is_the_episodes_as_they_came_or_long_ones() -> None:
    assert [len(e) for e in workload(None, 8)] == [len(e) for e in read_episodes()[:8]]
    assert all(len(episode) >= 2048 for episode in workload(2048, 2))


def test_advantages_are_grpos_where_they_are_asked_for() -> None:
    """7 of the 12 groups score alike."""
    episodes = workload(None, 48, "grpo")
    alike = 0
    for group in {each.group_id for each in episodes}:
        members = [each for each in episodes if each.group_id == group]
        rewards = np.array([each.reward for each in members])
        wanted = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        for episode, value in zip(members, wanted, strict=True):
            trained = episode.advantages[episode.loss_mask == 1]
            np.testing.assert_allclose(trained, value, rtol=1e-5, atol=1e-6)
            assert not episode.advantages[episode.loss_mask == 0].any()
        alike += not any(episode.advantages.any() for episode in members)
    assert alike == 7
