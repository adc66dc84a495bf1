"""Kept episodes, put together from the samples in their files.

This is the one way from a file to episodes. What leaves the run directory is read with a
`Redaction`, which is applied here, and nowhere behind it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from earl_core.run.episodes import read_samples
from earl_core.secrets.rules import Redaction
from earl_core.trajectory.samples import OPPONENT_ROLE, transcript

_LISTS = ("texts", "turn_rewards")
_ALWAYS = ("episode_id", "environment", *_LISTS, "role")
_JSON = ("scores", "scoring")
_SHOWN = ("episode_id", "prompt_id", "environment", "outcome", "finish_reason", "reward")
_COUNTED = ("turn_starts", "loss_mask", "rollout_logprobs")


@dataclass(frozen=True)
class KeptEpisodes:
    """Episodes of a file. samples: theirs, with all columns that were read. episodes: of each
    `iteration`, the fields that were asked for (`scores` and `scoring` as data), `texts`
    (observation and answer in turn, then what was said at the end) and `turn_rewards` of all its
    samples, `rows`, where these stand among `samples`, and `begins`, a hash of the environment and
    the first observation as they were kept."""

    samples: pa.Table
    episodes: list[dict[str, Any]]


def own_samples(samples: pa.Table) -> pa.Table:
    """The samples that are not an opponent's, whose turns and rewards are none of the episode's."""
    if "role" not in samples.column_names:
        return samples
    return samples.filter(pc.not_equal(samples["role"], OPPONENT_ROLE))


def kept_episodes(
    path: Path,
    redaction: Redaction | None,
    fields: Sequence[str],
    columns: Sequence[str] = (),
    most: int | None = None,
) -> KeptEpisodes:
    """The first `most` episodes of a file (None: all).

    redaction: what they pass, where they leave the run directory; None: they stay. fields: of an
    episode; columns: further ones of its samples. Raises `FileNotFoundError`, `EpisodesDamaged`.
    """
    samples = own_samples(read_samples(path, most, (*_ALWAYS, *fields, *columns)))
    known = {name: samples[name].to_pylist() for name in {*_LISTS, "environment", *fields}}
    ids = samples["episode_id"].to_numpy()
    starts = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1)).tolist()
    episodes = []
    for start, stop in itertools.pairwise([*starts, len(ids)]):
        episode: dict[str, Any] = {name: known[name][start] for name in fields}
        episode |= {name: json.loads(episode[name] or "null") for name in _JSON if name in episode}
        for name in _LISTS:
            episode[name] = list(itertools.chain(*known[name][start:stop]))
        first = "\n".join([known["environment"][start], *episode["texts"][:1]])
        episode["begins"] = xxhash.xxh3_64_intdigest(first.encode())
        episode |= {"iteration": int(path.parent.name), "rows": range(start, stop)}
        episodes.append(episode if redaction is None else redaction.episode(episode))
    return KeptEpisodes(samples, episodes)


def read_episodes(
    path: Path, redaction: Redaction | None, most: int | None = None
) -> list[dict[str, Any]]:
    """The first `most` episodes to read (None: all), none where none were kept.

    Each: episode_id, prompt_id, environment, outcome, finish_reason, reward, `turns` (observation,
    answer, reward, the `tokens` of the answer, their mean `logprob` in nats, and the tokens that
    stood before it, `context`) and `closing`. redaction: as of `kept_episodes`, which raises
    `EpisodesDamaged`.
    """
    try:
        kept = kept_episodes(path, redaction, _SHOWN, _COUNTED, most)
    except FileNotFoundError:
        return []
    samples = kept.samples.select(_COUNTED).to_pylist()
    found = []
    for episode in kept.episodes:
        read = transcript(episode["texts"], episode["turn_rewards"])
        counted = (each for row in episode["rows"] for each in _counted(samples[row]))
        for turn, numbers in zip(read["turns"], counted, strict=True):
            turn.update(numbers)
        found.append({**{name: episode[name] for name in _SHOWN}, **read})
    return found


def _counted(sample: dict[str, Any]) -> Iterator[dict[str, float]]:
    """Tokens, context and mean log-prob of each turn of a sample."""
    mask, logprobs = sample["loss_mask"], sample["rollout_logprobs"]
    for start, stop in itertools.pairwise([*sample["turn_starts"], len(mask)]):
        tokens = sum(mask[start:stop])
        # 0 where the mask is 0.
        mean = sum(logprobs[start:stop]) / max(tokens, 1)
        yield {"tokens": tokens, "context": stop - tokens, "logprob": mean}
