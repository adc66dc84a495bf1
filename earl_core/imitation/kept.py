"""The best episodes that a run has kept, with the tokens that were sampled."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.compute as pc

from earl_core.config.imitation import ImitationConfig
from earl_core.imitation.chats import NO_VERSION
from earl_core.pretrained.vocabulary import vocabulary_problem
from earl_core.run.episodes import NAME, EpisodesDamaged, read_samples
from earl_core.run.kept_episodes import own_samples
from earl_core.run.record import stored_config
from earl_core.system.errors import ConfigError, EarlError
from earl_core.trajectory.samples import UNNUMBERED, Episode, Sample

_CHOSEN_BY = ("group_id", "reward")


class _Kept(NamedTuple):
    path: Path
    episode: int
    group: int
    reward: float


class KeptEpisodes:
    """Demonstrations from a run's directory. vocabulary: tokens of the model that imitates.

    Raises `ConfigError` for a directory without kept episodes, or without one that is good enough.
    """

    def __init__(self, run: Path, settings: ImitationConfig, vocabulary: int) -> None:
        files = sorted(run.glob(f"iterations/[0-9]*/{NAME}"))
        if not files:
            raise ConfigError(
                f"imitation.run: {run} has no kept episodes",
                remedy="name a run that has tracking.keep_episodes",
            )
        self._vocabulary = vocabulary
        self._episodes = [kept for path in files for kept in _best(path, settings)]
        if not self._episodes:
            raise ConfigError(
                f"imitation.run: none of the episodes of {run} has a reward of "
                f"imitation.min_reward ({settings.min_reward}) or more"
                if settings.min_reward is not None
                else f"imitation.run: none of the episodes of {run} has a reward"
            )

    def __len__(self) -> int:
        return len(self._episodes)

    def place(self, index: int) -> str:
        """Name the place where people find an episode."""
        kept = self._episodes[index]
        return f"episode {kept.episode} of {kept.path}"

    def episode(self, index: int) -> Episode:
        """One episode. Raises `ConfigError` for tokens that the model does not have."""
        kept = self._episodes[index]
        table = _samples(kept.path)
        rows = own_samples(table.filter(pc.equal(table["episode_id"], kept.episode))).to_pylist()
        samples = [_sample(row) for row in rows]
        if max(token for sample in samples for token in sample.tokens) >= self._vocabulary:
            raise ConfigError(
                f"{self.place(index)} has tokens beyond the {self._vocabulary} of the model",
                remedy="imitate a run of a model with this one's tokenizer",
            )
        info = {"outcome": rows[0]["outcome"]} if rows[0]["outcome"] else {}
        return Episode(
            index,
            index,
            index,
            samples,
            rows[0]["finish_reason"],
            info,
            rows[0]["environment"],
            shared_reward=rows[0].get("shared_reward") or 0.0,
        )


def check_tokens(run: Path, policy: Path) -> None:
    """Raise `ConfigError` where the run's model has other tokens under the ids of the policy's.

    Nothing is compared where its tokenizer is not there any more.
    """
    try:
        theirs = Path(stored_config(run).initial_model.path)
    except EarlError:
        return
    if problem := vocabulary_problem(policy, theirs, (0, 0)):
        raise ConfigError(
            f"imitation.run: the model of {run} has another vocabulary ({problem})",
            remedy="imitate a run of a model with this one's tokenizer",
        )


@lru_cache(maxsize=4)
def _samples(path: Path) -> Any:
    return _read(path, None)


def _read(path: Path, columns: tuple[str, ...] | None) -> Any:
    try:
        return read_samples(path, columns=columns)
    except (EpisodesDamaged, FileNotFoundError) as error:
        raise ConfigError(f"imitation.run: {error}") from error


def _best(path: Path, settings: ImitationConfig) -> Iterator[_Kept]:
    """The chosen episodes of an iteration, ascending."""
    table = _read(path, _CHOSEN_BY)
    columns = (table[name].to_pylist() for name in ("episode_id", *_CHOSEN_BY))
    # An episode may have several samples, each with its reward; one without could not be scored.
    found = {
        episode: _Kept(path, episode, group, reward)
        for episode, group, reward in zip(*columns, strict=True)
        if reward is not None
    }
    ordered = sorted(found.values(), key=lambda kept: (kept.group, kept.episode))
    for _, group in groupby(ordered, lambda kept: kept.group):
        members = list(group)
        size = settings.best_of or len(members)
        for first in range(0, len(members), size):
            # Of equally good ones the first.
            best = max(members[first : first + size], key=lambda kept: kept.reward)
            if settings.min_reward is None or best.reward >= settings.min_reward:
                yield best


def _sample(row: dict[str, Any]) -> Sample:
    turns = len(row["turn_starts"])
    return Sample(
        tokens=row["tokens"],
        loss_mask=row["loss_mask"],
        rollout_logprobs=row["rollout_logprobs"],
        turn_starts=row["turn_starts"],
        # Their versions are those of another run.
        policy_version_first=[NO_VERSION] * turns,
        policy_version_last=[NO_VERSION] * turns,
        turn_rewards=row["turn_rewards"],
        # Files of older releases lack these two.
        turn_numbers=row.get("turn_numbers") or [UNNUMBERED] * turns,
        turn_anchors=row.get("turn_anchors") or [0] * turns,
        texts=row["texts"],
        role=row.get("role") or "",
    )
