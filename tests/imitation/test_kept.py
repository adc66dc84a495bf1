"""The best episodes of another run, with the tokens that were sampled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from earl_core.config import ConfigError
from earl_core.config.imitation import ImitationConfig
from earl_core.imitation.kept import KeptEpisodes, check_tokens
from earl_core.run import RunDirectory
from earl_core.run.episodes import write_episodes
from earl_core.trajectory.samples import Episode
from tests.kept import game, seal_episodes
from tests.run.test_run_directory import config_in


def played(number: int, group: int, reward: float, samples: int = 1) -> Episode:
    """An episode whose tokens tell which it is."""
    episode = game(number, "win" if reward > 0 else "loss", samples)
    episode.group_id = episode.prompt_id = group
    episode.samples[0].tokens[0] = 20 + number
    episode.samples[-1].turn_rewards[-1] = reward
    return episode


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two iterations of two groups of four."""
    run = RunDirectory.open(config_in(tmp_path_factory.mktemp("kept")))
    for iteration, rewards in enumerate(
        ([-1.0, 0.5, 1.0, 1.0, -1.0, -1.0, -1.5, -1.0], [0.3, 0.0, 2.0, 0.0, 1.0, 1.0, 1.0, 3.0])
    ):
        episodes = [
            played(8 * iteration + at, 2 * iteration + at // 4, reward, samples=1 + at % 2)
            for at, reward in enumerate(rewards)
        ]
        sealed = seal_episodes(run, iteration, [episodes[:3], episodes[3:]])
        write_episodes(run.episodes_path(iteration), run.stores, *sealed)
    run.close()
    return run.path


def chosen(run: Path, **settings: object) -> KeptEpisodes:
    told = {"run": str(run), "iterations": 1, **settings}
    return KeptEpisodes(run, ImitationConfig.model_validate(told), 64)


@pytest.mark.parametrize(
    ("settings", "best"),
    [
        ({}, [2, 4, 10, 15]),
        ({"best_of": 2}, [1, 2, 4, 7, 8, 10, 12, 15]),
        ({"best_of": 3, "min_reward": 1.0}, [2, 3, 10, 12, 15]),
        ({"best_of": 1}, [*range(16)]),
        ({"min_reward": 2.0}, [10, 15]),
    ],
)
def test_the_best_of_so_many_are_chosen(
    run: Path, settings: dict[str, float], best: list[int]
) -> None:
    """Of equal ones the first; of a group the rest that is smaller counts as one, too."""
    found = chosen(run, **settings)
    episodes = [found.episode(index) for index in range(len(found))]
    assert [episode.samples[0].tokens[0] - 20 for episode in episodes] == best
    assert found.place(0).startswith(f"episode {best[0]} of {run}")


def test_tokens_are_as_they_were_sampled(run: Path) -> None:
    found = chosen(run, best_of=1)
    for index in range(len(found)):
        ours, theirs = found.episode(index), played(index, 0, 1.0, samples=1 + index % 2)
        assert len(ours.samples) == len(theirs.samples)
        for one, other in zip(ours.samples, theirs.samples, strict=True):
            for name in ("tokens", "loss_mask", "rollout_logprobs", "turn_starts", "texts"):
                assert getattr(one, name) == getattr(other, name)
        # No version of the run that imitates has sampled them.
        versions = {each for sample in ours.samples for each in sample.policy_version_first}
        assert versions == {-1}


def test_a_run_that_has_nothing_to_imitate_is_named(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no kept episodes: name a run"):
        chosen(tmp_path)
    with pytest.raises(ConfigError, match=r"none of the episodes of .* has a reward of .*9"):
        chosen(run, min_reward=9.0)
    told = ImitationConfig(run=str(run), iterations=1)
    with pytest.raises(ConfigError, match=r"episode 2 of .* has tokens beyond the 12 of the model"):
        KeptEpisodes(run, told, 12).episode(0)


def test_a_run_of_other_tokens_is_named(tmp_path: Path) -> None:
    """Ids of its episodes would be others' words."""
    for name, words in (("theirs", "ab"), ("ours", "ba"), ("same", "ab")):
        (tmp_path / name).mkdir()
        vocabulary = {word: number for number, word in enumerate(words)}
        told = json.dumps({"model": {"vocab": vocabulary}})
        (tmp_path / name / "tokenizer.json").write_text(told)
    run = RunDirectory.open(config_in(tmp_path, model={"path": str(tmp_path / "theirs")}))
    run.close()
    check_tokens(run.path, tmp_path / "same")
    with pytest.raises(ConfigError, match=r"has another vocabulary \(token 0 is 'a' there and 'b'"):
        check_tokens(run.path, tmp_path / "ours")
    (tmp_path / "theirs" / "tokenizer.json").unlink()
    check_tokens(run.path, tmp_path / "ours")
