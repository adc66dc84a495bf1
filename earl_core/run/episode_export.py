"""Kept episodes of a run for others to read: JSON lines or Parquet, after rules of redaction.

One episode a row: `iteration`, `episode_id`, `group_id`, `prompt_id`, `environment`, `outcome`,
`finish_reason`, `reward`, `scores` and `scoring` (JSON), `messages` (role and content, observation
and answer in turn) and `closing`. Tokens and their log-probs stay here: they are the text again.
Rules are applied before anything is written; the file appears whole or not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from earl_core.config import ConfigError
from earl_core.run.episodes import NAME, EpisodesDamaged
from earl_core.run.kept_episodes import kept_episodes
from earl_core.run.remnants import Remnants
from earl_core.secrets.rules import Redaction
from earl_core.system.files import write_atomic, writing_atomic
from earl_core.trajectory.samples import transcript

_JSON = ("scores", "scoring")
_FIELDS = (
    "episode_id", "group_id", "prompt_id", "environment", "outcome", "finish_reason", "reward",
    *_JSON,
)  # fmt: skip


class Exported(NamedTuple):
    """episodes: how many were written. found: how often each rule has hidden something. report:
    the file that says what is left. remnants: that. damaged: why some were not read."""

    episodes: int
    found: Mapping[str, int]
    report: Path
    remnants: Mapping[str, Any]
    damaged: tuple[str, ...]


def export_episodes(run: Path, target: Path, redaction: Redaction) -> Exported:
    """Write a run's kept episodes to `target`, `.jsonl` or `.parquet`, and beside it a report of
    what is left in them that is to be looked at (`remnants`), for their owner alone.

    Raises `ConfigError` where there are none, or where the rules leave nothing of any text,
    `EpisodesDamaged` where none can be read, and `OSError`.
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
    rules = redaction.rules
    rows, damaged, remnants = [], [], Remnants()
    for file in files:
        try:
            for episode in kept_episodes(file, redaction, _FIELDS).episodes:
                rows.append(_row(episode, rules.drop_fields))
                remnants.look_at(rows[-1], rules.hash_fields)
        except EpisodesDamaged as error:
            damaged.append(str(error))
    if damaged and not rows:
        raise EpisodesDamaged(f"no kept episodes of {run} can be read: {damaged[0]}")
    redaction.check_something_left()
    _write(rows, target)
    told = {"rules": dict(redaction.found), **remnants.report()}
    write_atomic(report, json.dumps(told, indent=1, ensure_ascii=False).encode(), 0o600)
    return Exported(len(rows), redaction.found, report, told, tuple(damaged))


def _row(episode: dict[str, Any], left_out: Sequence[str]) -> dict[str, Any]:
    read = transcript(episode["texts"], episode["turn_rewards"])
    messages = [
        {"role": role, "content": turn[part]}
        for turn in read["turns"]
        for role, part in (("user", "observation"), ("assistant", "answer"))
    ]
    row = {"messages": messages, "closing": read["closing"]}
    row |= {name: episode[name] for name in ("iteration", *_FIELDS)}
    return {name: row[name] for name in row if name not in left_out}


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
