"""Kept episodes of a run for others to read: JSON lines or Parquet, after rules of redaction.

One episode a row: `iteration`, `episode_id`, `group_id`, `prompt_id`, `environment`, `outcome`,
`finish_reason`, `reward`, `scores` and `scoring` (JSON), `messages` (role and content, observation
and answer in turn) and `closing`. Tokens and their log-probs stay here: they are the text again.
Rules are applied before anything is written; the file appears whole or not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from earl_core.config import ConfigError
from earl_core.run.episodes import NAME, EpisodesDamaged, read_samples
from earl_core.run.remnants import Remnants
from earl_core.secrets.rules import Redaction, RedactionRules
from earl_core.system.files import write_atomic, writing_atomic
from earl_core.trajectory.samples import OPPONENT_ROLE, transcript

_SCALARS = ("episode_id", "group_id", "prompt_id", "environment", "outcome", "finish_reason")
_JSON = ("scores", "scoring")
_COLUMNS = (*_SCALARS, *_JSON, "reward", "texts", "turn_rewards", "role")


class Exported(NamedTuple):
    """episodes: how many were written. found: how often each rule has hidden something. report:
    the file that says what is left. remnants: that. damaged: why some were not read."""

    episodes: int
    found: Mapping[str, int]
    report: Path
    remnants: Mapping[str, Any]
    damaged: tuple[str, ...]


def export_episodes(run: Path, target: Path, rules: RedactionRules | None) -> Exported:
    """Write a run's kept episodes to `target`, `.jsonl` or `.parquet`, and beside it a report of
    what is left in them that is to be looked at (`remnants`), for their owner alone.

    rules: None: the redactor alone. Raises `ConfigError` where there are none, or where rules leave
    nothing of any text, and `OSError`.
    """
    if target.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"{target} is to end with .jsonl or .parquet: choose another --output")
    report = target.with_name(f"{target.name}.left.json")
    if target.exists() and not report.is_file():
        raise ConfigError(
            f"{target} is no export of ours, and is not replaced: choose another --output"
        )
    files = sorted(run.glob(f"iterations/[0-9]*/{NAME}"))
    if not files:
        raise ConfigError(f"{run} has kept no episodes (tracking.keep_episodes)")
    redaction = Redaction(rules or RedactionRules.model_construct())
    rows, damaged, remnants = [], [], Remnants()
    for file in files:
        try:
            for episode in kept_episodes(file):
                rows.append(_redacted(episode, redaction))
                remnants.look_at(rows[-1], redaction.rules.hash_fields)
        except EpisodesDamaged as error:
            damaged.append(str(error))
    if redaction.hides_all:
        raise ConfigError(
            "the rules leave nothing of any text: name what is to be hidden, or drop the fields "
            "`messages` and `closing`"
        )
    _write(rows, target)
    told = {"rules": dict(redaction.found), **remnants.report()}
    write_atomic(report, json.dumps(told, indent=1, ensure_ascii=False).encode(), 0o600)
    return Exported(len(rows), redaction.found, report, told, tuple(damaged))


def kept_episodes(file: Path) -> Iterator[dict[str, Any]]:
    """The episodes of a file, each with its scalars, `scores` and `scoring` as data, and `texts`:
    of all its samples, observation and answer in turn. Raises `EpisodesDamaged`."""
    episodes: dict[int, dict[str, Any]] = {}
    for row in read_samples(file, columns=_COLUMNS).to_pylist():
        if row.pop("role", "") == OPPONENT_ROLE:
            continue
        known = episodes.setdefault(
            row["episode_id"],
            {
                "iteration": int(file.parent.name),
                **{name: row[name] for name in _SCALARS},
                "reward": row["reward"],
                **{name: json.loads(row[name]) if row[name] else None for name in _JSON},
                "texts": [],
                "turn_rewards": [],
            },
        )
        known["texts"] += row["texts"]
        known["turn_rewards"] += row["turn_rewards"]
    yield from episodes.values()


def _redacted(episode: dict[str, Any], redaction: Redaction) -> dict[str, Any]:
    """The row of an episode, with the rules applied to all that is in it."""
    rewards = episode.pop("turn_rewards")
    read = transcript(redaction.texts(episode.pop("texts")), rewards)
    messages = [
        {"role": role, "content": turn[part]}
        for turn in read["turns"]
        for role, part in (("user", "observation"), ("assistant", "answer"))
    ]
    found = {"messages": messages, "closing": read["closing"]}
    rules = redaction.rules
    for name, value in episode.items():
        # Numbers of ours are no text of anybody's.
        own = name in ("iteration", "episode_id", "group_id", "prompt_id", "reward")
        found[name] = value if own else redaction.value(value)
    for name in rules.hash_fields:
        found[name] = redaction.hashed([name, found[name]])
    return {name: found[name] for name in found if name not in rules.drop_fields}


def _write(rows: list[dict[str, Any]], target: Path) -> None:
    with writing_atomic(target) as descriptor, os.fdopen(descriptor, "wb", closefd=False) as stream:
        if target.suffix == ".jsonl":
            for row in rows:
                stream.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            return
        flat = [
            {k: json.dumps(v, ensure_ascii=False) if k in _JSON else v for k, v in row.items()}
            for row in rows
        ]
        pq.write_table(pa.Table.from_pylist(flat), stream, compression="zstd")
