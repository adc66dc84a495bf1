"""The run's records: `run.json`, which says which run a directory is, and journals.

`run.json` also says what the run was last opened with, and checks itself. A copied directory keeps
the uid: opened, it would release the original's shards and write into the original's tracked run.
So `run.json` notes path, device and inode of its directory. A directory that was renamed has the
same inode; one that was moved to another file system or mounted elsewhere has another, but nothing
lies at the noted place any more. Only where the noted place still holds the same uid is it a copy.

A journal is a file of JSON lines that is only appended to, each line with a digest of its own.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from earl_core.config import ConfigError, RunConfig, load_config
from earl_core.config.stage_keys import look_up
from earl_core.dispatch.segments.pool_directory import is_uid, new_uid
from earl_core.system.errors import EarlError
from earl_core.system.files import (
    canonical_json,
    make_directory,
    read_file,
    sync,
    write_all,
    write_atomic,
)
from earl_core.system.storage_errors import naming

logger = logging.getLogger(__name__)


def read_uid(run_directory: str | Path) -> str:
    """The uid of the run in this directory, fit to become a part of a path. Raises `RunDamaged`,
    and `FileNotFoundError` where no run is."""
    return checked_uid(read_record(Path(run_directory)), Path(run_directory))


def checked_uid(record: Mapping[str, Any], run_directory: Path) -> str:
    """The uid in a run's record; raises `RunDamaged` for anything that is none."""
    uid = record.get("uid")
    if not is_uid(uid):
        raise RunDamaged(
            f"{run_directory / 'run.json'} is damaged: its uid is {uid!r} and not twelve "
            "hexadecimal digits; start a new run under another name"
        )
    return str(uid)


def place_of(run_directory: Path) -> dict[str, Any]:
    """Describe the place of a run, as run.json notes it."""
    status = run_directory.stat()
    path = str(run_directory.resolve())
    return {"path": path, "device": status.st_dev, "inode": status.st_ino}


def check_not_copied(run_directory: Path, uid: str, noted: Mapping[str, Any] | None) -> None:
    """Raise `ConfigError` when this directory is a copy of the one whose place was noted. noted:
    from `place_of`, perhaps of an earlier attempt; None where nothing was noted."""
    here = place_of(run_directory)
    if noted is None or all(noted[key] == here[key] for key in ("device", "inode")):
        return
    check_other_place(run_directory, uid, Path(noted["path"]))


def check_other_place(run_directory: Path, uid: str, other: Path) -> None:
    """Raise `ConfigError` when another directory than this one holds the same run."""
    if not _holds(other, uid) or _same(other, run_directory):
        return
    raise ConfigError(
        f"{run_directory} is a copy of the run in {other}, and two directories cannot share one "
        f"run's shards and tracking: go on with {other}; or move it away, and the copy takes its "
        "place; or start a new run from the copy's weights, with another --name and --from "
        f"{run_directory}"
    )


def _holds(directory: Path, uid: str) -> bool:
    try:
        return bool(read_record(directory).get("uid") == uid)
    except (OSError, RunDamaged):
        return False


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


FORMAT = "earl.run/4"

STALENESS = "staleness"
"""In run.json: the run's staleness over its iterations."""

FORKED = "forked"
"""In run.json of a fork: its parent, as of `lineage`, and `keys`, the uid in its stages' keys."""

INHERITED = "inherited"
"""The folder with what a fork may take over of its parent's later stages."""

SOFTWARE = "software"
"""In the ledger's line where an attempt begins: versions of what it computes with, its machine."""

_PLACE = ("name", "runs_directory")
"""Settings that say where a run lies: they follow it when it is moved."""


class RunDamaged(EarlError):
    """A run directory holds something else than what EARL wrote there."""


class OtherFormat(RunDamaged):
    """Another version of EARL made the run."""


def read_record(run_directory: Path) -> dict[str, Any]:
    """The content of a run's `run.json`. Raises `FileNotFoundError` when there is none and
    `RunDamaged` when it is not what was written."""
    path = Path(run_directory) / "run.json"
    try:
        record = json.loads(read_file(path))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RunDamaged(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        record = None
    written = record.get("format") if isinstance(record, dict) else None
    if isinstance(written, str) and written.startswith("earl.run/") and written != FORMAT:
        raise OtherFormat(
            f"{path} has the format {written}, and this version of earl reads {FORMAT}: start a "
            "new run under another name"
        )
    if not isinstance(record, dict) or record.pop("digest", None) != _digest(record):
        raise RunDamaged(
            f"{path} is damaged or was edited: put it back as it was, or start a new run under "
            "another name"
        )
    return record


def open_record(run_directory: Path) -> dict[str, Any]:
    """The run's record; that of a new run where there is none. Raises `RunDamaged` where it was
    lost."""
    try:
        return read_record(run_directory)
    except FileNotFoundError:
        pass
    for name in ("config.yaml", "iterations", "checkpoints", "metrics.jsonl"):
        if _holds_something(run_directory / name):
            raise RunDamaged(
                f"{run_directory} holds a run but no run.json: put it back, or start a new run "
                "under another name"
            )
    write_record(run_directory, {"uid": new_uid(), "attempts": 0})
    return read_record(run_directory)


def _holds_something(path: Path) -> bool:
    # An empty folder may be a file system that was mounted there for the run's checkpoints.
    return any(path.iterdir()) if path.is_dir() else path.exists()


def config_of_run(run_directory: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration in a run directory, with overrides. Raises `RunDamaged` for a run of
    another format, else what `load_config` raises."""
    try:
        read_record(Path(run_directory))
    except OtherFormat:
        raise
    except (FileNotFoundError, RunDamaged):
        pass  # Whoever opens the run says so.
    return load_config(Path(run_directory) / "config.yaml", overrides)


def stored_config(run_directory: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the configuration as `config_of_run` does, by the name and place that the run has now.
    Raises `ConfigError` where no run lies."""
    if not (run_directory / "config.yaml").is_file():
        raise ConfigError(
            f"{run_directory} is not a run directory (no config.yaml): start the run with "
            "`earl train` or the `train` deployment first"
        )
    name = run_directory.name or run_directory.resolve().name
    place = {"name": name, "runs_directory": str(run_directory.parent)}
    return config_of_run(run_directory, overrides).model_copy(update=place)


def is_finished(run_directory: Path) -> bool:
    """Tell whether the run's record says that it is over; false where that cannot be read."""
    try:
        return read_record(run_directory).get("finished") is True
    except (FileNotFoundError, RunDamaged):
        return False


def key_uid(record: Mapping[str, Any]) -> str:
    """The uid that keys of a run's stages are made with; a fork's are its parent's."""
    return str(record.get(FORKED, {}).get("keys", record["uid"]))


def lineage(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a run was forked from or its ancestor, the ancestor of that and so on, by the run's
    record; empty without one. Each with from, name, path and digest, and that of a run with uid,
    iteration and policy_version; a fork's with critic_digest where its parent had a critic."""
    found = record.get(FORKED) or record.get("ancestor")
    return [dict(found), *found.get("ancestors", ())] if found else []


def lineage_names(record: Mapping[str, Any]) -> list[str]:
    """The ancestors as people call them, such as `tictactoe@12`; the nearest first."""
    found = lineage(record)
    steps = ["" if each.get("iteration") is None else f"@{each['iteration']}" for each in found]
    return [f"{each['name']}{step}" for each, step in zip(found, steps, strict=True)]


def write_record(run_directory: Path, record: Mapping[str, Any]) -> None:
    """Write `run.json`; on disk when this returns."""
    content = {"format": FORMAT, **record}
    content["digest"] = _digest(content)
    write_atomic(Path(run_directory) / "run.json", json.dumps(content, indent=1).encode())


def played_in(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the settings that decide what is played; weights and time limits may change. One
    environment has no label, and counts its prompts otherwise than a mixture of one."""
    played = (settings["environment"], *settings["environments"])
    names = ("label", "name", "agent", "options")
    return [{name: each[name] for name in names if name in each} for each in played if each]


def given_in(settings: Mapping[str, Any], part: str) -> Any:
    """Return a setting, of a section the keys that are set, to more than null and false: a run may
    be older than a key."""
    value = look_up(dict(settings), part)
    if isinstance(value, Mapping):
        return {n: each for n, each in value.items() if each is not None and each is not False}
    return value


def changed_settings(record: Mapping[str, Any], config: RunConfig) -> list[str]:
    """List the settings that differ from those of the run's last attempt, as `name: old → new`.

    A key that this release has added is one of them if it has another value than its default.
    """
    before = dict(flat(record.get("settings", {})))
    now = dict(flat(settings_of(config)))
    given = dict(flat(config.model_dump(mode="json", exclude=set(_PLACE), exclude_defaults=True)))
    return [
        f"{name}: {_shown(before, name)} → {_shown(now, name)}"
        for name in sorted(before.keys() | given.keys())
        if _shown(before, name) != _shown(now, name)
    ]


def staleness_over_iterations(
    record: Mapping[str, Any], staleness: int, iteration: int
) -> tuple[tuple[int, int], ...]:
    """The run's staleness from which iteration on, ascending. staleness: what it is opened with.
    iteration: the first that no STABLE checkpoint covers, where a change takes effect."""
    before = noted_staleness(record)
    if before is None:
        return ((0, staleness),)
    kept = tuple(each for each in before if each[0] < iteration)
    if kept and kept[-1][1] == staleness:
        return kept
    return (*kept, (iteration if kept else 0, staleness))


def noted_staleness(record: Mapping[str, Any]) -> tuple[tuple[int, int], ...] | None:
    """The staleness that the run was opened with last, in that form; None: it was never."""
    if STALENESS in record:
        return tuple((int(since), int(value)) for since, value in record[STALENESS])
    if "settings" not in record:
        return None
    # Runs of older releases have none.
    return ((0, int(record["settings"].get("schedule", {}).get("staleness", 0))),)


def settings_of(config: RunConfig) -> dict[str, Any]:
    """The settings as `run.json` holds them."""
    return config.model_dump(mode="json", exclude=set(_PLACE))


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting under its dotted name."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _shown(settings: Mapping[str, Any], name: str) -> str:
    return json.dumps(settings[name], ensure_ascii=False) if name in settings else "not set"


def _digest(record: Mapping[str, Any]) -> str:
    try:
        return hashlib.sha256(canonical_json(record)).hexdigest()
    except ValueError:
        return "of nothing: it holds a number that is none"


_LINE = re.compile(rb'(\{.+), "digest": "([0-9a-f]{16})"\}')


class Journal:
    """One file of lines. Any thread may append; one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a line, which must hold something; on disk when this returns."""
        self.append_all([line])

    def append_all(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append lines, as `append` does, and wait for the disk once."""
        texts = [json.dumps(line).encode() for line in lines]
        data = b"".join(
            text[:-1] + b', "digest": "' + _line_digest(text) + b'"}\n' for text in texts
        )
        make_directory(self.path.parent)
        with self._lock, naming(self.path):
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(self.path, flags, 0o600)
            try:
                size = os.fstat(descriptor).st_size
                # A crash may have cut the last line off: what follows must not become its end.
                torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
                write_all(descriptor, b"\n" + data if torn else data)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if size == 0:
                sync(self.path.parent)

    def read(self) -> list[dict[str, Any]]:
        """As `read_lines`."""
        return read_lines(self.path)


_named = set[tuple[Path, int]]()
"""Damaged lines that this process has named: a display reads a journal again and again."""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a journal, oldest first, without their digests; damaged ones are left out,
    and each named once. Raises `OSError` when something else than a file lies there."""
    try:
        *texts, rest = read_file(path).split(b"\n")
    except FileNotFoundError:
        return []
    lines, damaged = whole_lines([*texts, rest])
    # A last line without a newline may be in the middle of being written.
    most = len(texts) if rest.startswith(b"{") else len(texts) + 1
    for number in damaged:
        if number <= most and (path, number) not in _named:
            _named.add((path, number))
            logger.warning(
                "line %d of %s is damaged and left out: it was edited, or a crash cut it off",
                number,
                path,
            )
    return lines


def whole_lines(texts: Sequence[bytes]) -> tuple[list[dict[str, Any]], list[int]]:
    """The whole ones of a journal's lines, without their digests, and the numbers (from 1) of
    damaged ones."""
    lines, damaged = [], []
    for number, text in enumerate(texts, start=1):
        found = _LINE.fullmatch(text)
        if found is not None and _line_digest(found[1] + b"}") == found[2]:
            lines.append(json.loads(found[1] + b"}"))
        elif text:
            damaged.append(number)
    return lines, damaged


def _line_digest(text: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(text).encode()
