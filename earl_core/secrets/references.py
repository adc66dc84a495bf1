"""References: `env:NAME` and `file:PATH` stand in a configuration where a secret would.

They are stored, shown and compared as they are written. The process that uses the value resolves
them, at the last moment.
"""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path
from typing import Any

from earl_core.secrets.patterns import is_reference
from earl_core.secrets.redactor import learn
from earl_core.system.errors import ConfigError

_LARGEST = 1 << 16


def resolve(value: Any) -> Any:
    """A copy of plain data with every reference replaced by what it leads to. The values found are
    hidden from then on wherever this process shows or stores something. Raises `ConfigError`."""
    if isinstance(value, dict):
        return {name: resolve(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [resolve(item) for item in value]
    if not isinstance(value, str) or not is_reference(value):
        return value
    kind, _, place = value.partition(":")
    found = _from_environment(place) if kind == "env" else _from_file(Path(place).expanduser())
    learn(found)
    return found


def files_of(value: Any) -> list[str]:
    """The files that references in plain data name."""
    if isinstance(value, dict):
        return files_of(list(value.values()))
    if isinstance(value, list | tuple):
        return [each for item in value for each in files_of(item)]
    if isinstance(value, str) and is_reference(value) and value.startswith("file:"):
        return [value.removeprefix("file:")]
    return []


def _from_environment(name: str) -> str:
    found = os.environ.get(name, "")
    if not found:
        raise ConfigError(
            f"env:{name} leads to nothing: export {name} before the command (a resume needs it too)"
        )
    return found


def _from_file(path: Path) -> str:
    if not path.is_absolute():
        raise ConfigError(
            f"file:{path} is relative to a working directory: write the whole path, so that a "
            "resume finds it too"
        )
    try:
        # A FIFO would be waited for.
        with open(
            path, "rb", opener=lambda name, how: os.open(name, how | os.O_NONBLOCK)
        ) as stream:
            about = os.fstat(stream.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise ConfigError(f"file:{path} is no regular file")
            if about.st_uid == os.geteuid() and about.st_mode & 0o077:
                raise ConfigError(
                    f"file:{path} can be read by others: change that with "
                    f"`chmod 600 {shlex.quote(str(path))}`"
                )
            found = stream.read(_LARGEST + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"file:{path} cannot be read ({reason}): correct it") from None
    if not found.strip() or len(found) > _LARGEST:
        raise ConfigError(f"file:{path} is empty or too large: it must hold the secret alone")
    return found.strip("\r\n")
