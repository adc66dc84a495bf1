"""Roles are compared with themselves: against formulas in numpy, role by role."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from earl_core.config.reward import RewardConfig
from earl_core.dispatch import Batch, ShardStore
from earl_core.experience.alike_groups import JudgedGroups
from earl_core.experience.reward import merge_rewards, reward_rows
from earl_core.experience.roles import RoleMoments, role_returns
from earl_core.trajectory.samples import Episode, Sample, VersionSpan, rollout_rows
from earl_core.trajectory.schema import ROLLOUT_SCHEMA
from tests.experience.test_distributed import configuration
from tests.experience.test_experience import sealed
from tests.experience.test_turns_in_time import of_episodes

GROUPS, SIZE = 5, 4


def made(chance: np.random.Generator) -> list[Episode]:
    """A planner in every episode, of two conversations in some; a solver in most; and some
    conversations without a role. Their turns interleave."""
    episodes = []
    for number in range(GROUPS * SIZE):
        roles = ["planner"] * (1 + number % 2) + ["solver"] * (number % 5 > 0) + [""] * (number % 3)
        roles += ["critic"] * (number == 6)
        samples = [Sample(role=role) for role in roles]
        order = chance.permutation(np.repeat(np.arange(len(samples)), 2))
        for at, place in enumerate(order.tolist()):
            count = int(chance.integers(1, 4))
            samples[place].begin_turn([1, 2], f"board {at // 3}")
            samples[place].answer(
                [3] * count, [-0.5] * count, [VersionSpan(0, 0, count)], number=at
            )
            samples[place].turn_rewards[-1] = int(chance.integers(-8, 9)) / 8
        episode = Episode(number, number // SIZE, 0, samples, "done")
        # Solvers live on another scale, which would show in a baseline of both.
        for sample in samples:
            if sample.role == "solver":
                sample.turn_rewards = [20 + each for each in sample.turn_rewards]
        episode.shared_reward = int(chance.integers(-4, 5)) / 4
        episodes.append(episode)
    return episodes


def expected(episodes: list[Episode], spec: str, scores: dict[int, float]) -> dict[Any, Any]:
    """The advantage of each turn, by (episode, its number in time)."""
    turns: dict[tuple[str, int, int], dict[int, tuple[float, int]]] = {}
    for episode in episodes:
        for sample in episode.samples:
            part = turns.setdefault((sample.role, episode.group_id, episode.episode_id), {})
            lengths = np.diff(
                [*np.cumsum([0, *sample.loss_mask])[sample.turn_starts], sum(sample.loss_mask)]
            )
            told = zip(sample.turn_numbers, sample.turn_rewards, lengths.tolist(), strict=True)
            part |= {at: (reward, length) for at, reward, length in told}
    for (_, _, number), part in turns.items():
        last = max(part)
        reward, length = part[last]
        (episode,) = (each for each in episodes if each.episode_id == number)
        part[last] = (reward + episode.shared_reward + scores[number], length)
    found: dict[Any, Any] = {}
    for (role, group, number), part in turns.items():
        of_role = {
            key: sum(r for r, _ in each.values()) for key, each in turns.items() if key[0] == role
        }
        own = of_role[role, group, number]
        peers = np.array([value for key, value in of_role.items() if key[1] == group])
        others = [value for key, value in of_role.items() if key[1] == group and key[2] != number]
        if spec in ("rloo", "grpo", "dr_grpo", "turn_returns") and not others:
            continue
        for at in part:
            to_go = sum(reward for later, (reward, _) in part.items() if later >= at)
            n = len(peers)
            if spec == "rloo":
                value = own - np.mean(others)
            elif spec == "grpo":
                value = (own - peers.mean()) / (peers.std(ddof=1) + 1e-6)
            elif spec == "dr_grpo":
                value = own - peers.mean()
            elif spec == "turn_returns":
                value = n / (n - 1) * (to_go - peers.mean())
            elif spec == "batch_mean":
                value = own - np.mean(list(of_role.values()))
            else:
                weights = [sum(length for _, length in turns[key].values()) for key in of_role]
                values = np.repeat(list(of_role.values()), weights)
                value = (own - values.mean()) / max(values.std(), 1e-4)
            found[number, at] = value
    return found


@pytest.mark.parametrize(
    "spec", ["rloo", "grpo", "dr_grpo", "turn_returns", "batch_mean", "reinforce_plus_plus"]
)
def test_each_role_is_compared_with_itself(tmp_path: Path, spec: str) -> None:
    chance = np.random.default_rng(3)
    episodes = made(chance)
    scores = {number: int(chance.integers(0, 5)) / 4 for number in range(GROUPS * SIZE)}
    advantage = {"name": "reinforce", "baseline": "batch_mean"} if spec == "batch_mean" else spec
    given = {number: {"score": score} for number, score in scores.items()}
    found, metrics = of_episodes(tmp_path, episodes, advantage, scores=given)
    wanted = expected(episodes, spec, scores)
    rows = [(episode, sample) for episode in episodes for sample in episode.samples]
    kept = [each for each in rows if (each[0].episode_id, each[1].turn_numbers[0]) in wanted]
    assert metrics["episodes_kept"] == len({number for number, _ in wanted})
    assert metrics["episodes_dropped_with_group"] == len(episodes) - metrics["episodes_kept"]
    # A role that is alone in its group leaves it.
    assert len(kept) == len(found)
    assert (len(kept) < len(rows)) == (spec not in ("batch_mean", "reinforce_plus_plus"))
    assert metrics["std"] > 0.1
    for values, (episode, sample) in zip(found, kept, strict=True):
        starts = np.cumsum([0, *sample.loss_mask])[sample.turn_starts[1:]]
        for at, part in zip(sample.turn_numbers, np.split(values, starts), strict=True):
            np.testing.assert_allclose(part, wanted[episode.episode_id, at], atol=2e-5, rtol=2e-5)


def test_gigpo_compares_observations_within_a_role(tmp_path: Path) -> None:
    """Two roles that see the same and are paid on scales of their own: by themselves, as alone."""
    whole: dict[str, Any] = {}
    for kept in ("one", "two", "both"):
        episodes = []
        for number in range(8):
            chance, samples = np.random.default_rng(number), []
            for role, scale in (("one", 1.0), ("two", 50.0)):
                sample = Sample(role=role)
                for turn in range(2):
                    sample.begin_turn([1, 2], f"board {turn}")
                    sample.answer([3], [-0.5], [VersionSpan(0, 0, 1)])
                    sample.turn_rewards[-1] = scale * chance.normal()
                samples += [sample] if kept in (role, "both") else []
            episodes.append(Episode(number, number // 4, 0, samples, "done"))
        whole[kept] = of_episodes(tmp_path / kept, episodes, "gigpo")[0]
    assert np.abs(np.concatenate(whole["one"])).max() > 0.5
    for at, role in enumerate(("one", "two")):
        np.testing.assert_allclose(
            np.concatenate(whole["both"][at::2]), np.concatenate(whole[role]), atol=1e-6
        )


def test_returns_that_differ_in_their_last_bits_are_equal(tmp_path: Path) -> None:
    """0.1 + 0.2 is 0.3, as it is for episodes whose reward is a sum."""
    episodes = []
    for number, rewards in enumerate([(0.1, 0.2), (0.3, 0.0)]):
        sample = Sample(role="one")
        for reward in rewards:
            sample.begin_turn([1, 2])
            sample.answer([3], [-0.5], [VersionSpan(0, 0, 1)])
            sample.turn_rewards[-1] = reward
        episodes.append(Episode(number, 0, 0, [sample], "done"))
    found, _ = of_episodes(tmp_path, episodes, "grpo")
    assert np.concatenate(found).tolist() == [0.0] * 4


def test_metrics_and_alike_groups_by_role(tmp_path: Path) -> None:
    episodes = []
    for number, (ones, twos) in enumerate([(1, 1), (1, 3), (2, 2), (2, 2)]):
        samples = []
        for role, reward in (("one", ones), ("two", twos)):
            sample = Sample(role=role)
            sample.begin_turn([1, 2])
            sample.answer([3], [-0.5], [VersionSpan(0, 0, 1)])
            sample.turn_rewards[-1] = reward
            samples.append(sample)
        episode = Episode(number, number // 2, 0, samples, "done")
        episode.shared_reward = 0.5
        episodes.append(episode)
    store = ShardStore(tmp_path / "shm", 2**30)
    with Batch(store, [sealed(store, "rollout", ROLLOUT_SCHEMA, rollout_rows(episodes))]) as batch:
        rows, metrics, _ = reward_rows(batch, RewardConfig(environment_weight=2.0))
        returns = role_returns(batch, rows)
        again = role_returns(batch, rows, [0])
    assert metrics["mean"] == pytest.approx(2 * np.mean([2.5, 4.5, 4.5, 4.5]))
    assert np.asarray(rows.numbers["reward"])[:2].tolist() == [5.0, 5.0]
    assert [each.tolist() for each in rows.numbers["turn_totals"]][2:4] == [[3.0], [7.0]]
    tally = RoleMoments.of(returns)
    moments = tally.moments
    assert (moments["one"].mean, moments["two"].mean) == pytest.approx((4.0, 5.0))
    assert {role: each.count for role, each in RoleMoments.of(again).moments.items()} == {
        "one": 2,
        "two": 2,
    }
    result = {"shards": [], "metrics": {}, "roles": tally.model_dump()}
    # A rank without a named role tells its returns, too, for the episodes are dealt by chance.
    alone = RoleMoments.of({"": {2: [1.0, 3.0]}}).model_dump()
    other = {**result, "roles": alone}
    beside = merge_rewards([result, other], configuration(tmp_path))["metrics"]
    assert beside["of_role/unnamed/mean"] == pytest.approx(2.0)
    nameless = merge_rewards([other, other], configuration(tmp_path))["metrics"]
    assert not any(name.startswith("of_role/") for name in nameless)
    merged = merge_rewards([result], configuration(tmp_path))["metrics"]
    assert merged["of_role/two/mean"] == pytest.approx(5.0)
    assert merged["of_role/two/std"] == pytest.approx(np.std([3.0, 7.0, 5.0, 5.0]))
    judged = JudgedGroups.of_roles(map(JudgedGroups.of, returns.values()))
    assert (judged.different, judged.alike) == ([0], [1])
