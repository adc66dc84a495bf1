"""`run.json`: what identifies a run and what it was last opened with. It checks itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from earl_core.config import RunConfig, load_config
from earl_core.system.errors import ConfigError, EarlError
from earl_core.system.files import canonical_json, read_file, write_atomic

FORMAT = "earl.run/3"

_PLACE = ("name", "runs_directory")
"""Settings that say where a run lies: they follow it when it is moved."""


class RunDamaged(EarlError):
    """What lies in a run directory is not what EARL wrote there."""


class OtherFormat(RunDamaged):
    """Another version of EARL made the run."""


def read_record(run_directory: Path) -> dict[str, Any]:
    """The content of a run's `run.json`.

    Raises `FileNotFoundError` when there is none and `RunDamaged` when it is not what was written.
    """
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


def config_of_run(run_directory: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration in a run directory, with overrides.

    Raises `RunDamaged` for a run of another format, else what `load_config` raises.
    """
    try:
        read_record(Path(run_directory))
    except OtherFormat:
        raise
    except (FileNotFoundError, RunDamaged):
        pass  # Whoever opens the run says so.
    return load_config(Path(run_directory) / "config.yaml", overrides)


def stored_config(run_directory: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """As `config_of_run`, under the name and the place where the run lies now.

    Raises `ConfigError` where no run lies.
    """
    if not (run_directory / "config.yaml").is_file():
        raise ConfigError(
            f"{run_directory} is not a run directory (no config.yaml): start the run with "
            "`earl train` or the `train` deployment first"
        )
    name = run_directory.name or run_directory.resolve().name
    place = {"name": name, "runs_directory": str(run_directory.parent)}
    return config_of_run(run_directory, overrides).model_copy(update=place)


def is_finished(run_directory: Path) -> bool:
    """Whether the run says of itself that it is over; not where its record cannot be read."""
    try:
        return read_record(run_directory).get("finished") is True
    except (FileNotFoundError, RunDamaged):
        return False


def write_record(run_directory: Path, record: Mapping[str, Any]) -> None:
    """Write `run.json`; on disk when this returns."""
    content = {"format": FORMAT, **record}
    content["digest"] = _digest(content)
    write_atomic(Path(run_directory) / "run.json", json.dumps(content, indent=1).encode())


def changed_settings(record: Mapping[str, Any], config: RunConfig) -> list[str]:
    """What differs from the settings that the run last worked with, each as `name: old → new`."""
    before = dict(flat(record.get("settings", {})))
    now = dict(flat(settings_of(config)))
    return [
        f"{name}: {_shown(before, name)} → {_shown(now, name)}"
        for name in sorted(before.keys() | now.keys())
        if _shown(before, name) != _shown(now, name)
    ]


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
