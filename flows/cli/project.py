"""`earl init`: a project of one's own to begin with."""

from __future__ import annotations

import importlib.util
import keyword
import re
import shlex
import sys
from pathlib import Path

from earl_core.system.errors import ConfigError
from earl_core.system.import_path import PACKAGES

TEMPLATE = Path(__file__).parent / "template"
_NAME = "my_game"
_OTHER_FOLDERS = ("tests", "runs", "models")


def create_project(directory: Path) -> None:
    """Write a package, a run file, a test and a README; the directory gives the package its name.
    Raises ConfigError for a directory that has something in it, and for a name that cannot be."""
    where = directory.resolve()
    name = where.name
    _check_name(name)
    if where.exists() and (not where.is_dir() or any(where.iterdir())):
        raise ConfigError(f"{directory} is there and not empty", remedy="name another directory")
    try:
        where.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be made: {error.strerror}", remedy="name another directory"
        ) from error
    for source in sorted(TEMPLATE.rglob("*")):
        if not source.is_file() or "__pycache__" in source.parts:
            continue
        place = where / str(source.relative_to(TEMPLATE)).replace(_NAME, name)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(source.read_text().replace(_NAME, name))
        print(directory / place.relative_to(where))
    there = shlex.quote(str(directory))
    print(f"\nNext: cd {there}, then pytest, earl env check run.yaml, earl train run.yaml")


def _check_name(name: str) -> None:
    if not name.isidentifier() or keyword.iskeyword(name) or not name.isascii():
        instead = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_").lower()
        usable = instead.isidentifier() and not keyword.iskeyword(instead)
        raise ConfigError(
            f"a package cannot be called {name!r}",
            remedy=f"call the directory {instead if usable else 'my_game'}",
        )
    if name in (*PACKAGES, *_OTHER_FOLDERS) or name in sys.stdlib_module_names:
        why = "a name that Python, EARL or the project uses itself"
    else:
        # A folder without code, such as the directory itself, is found without a file.
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:
            return
        why = f"the name of a module that is there already: {found.origin}"
    raise ConfigError(f"{name!r} is {why}", remedy="call the directory something else")
