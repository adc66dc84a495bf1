"""Makes `earl_core`, `tasks` and `flows` mean this project's, whatever else a process finds.

`tasks` and `flows` are names that others give to their own files, Prefect's users above all. Where
the working directory or PYTHONPATH comes before the installed packages, theirs would be imported
in place of ours. Installed packages are found by their metadata: importing some takes seconds.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from earl_core.system.errors import ConfigError

PACKAGES = ("earl_core", "tasks", "flows")

_ROOT = Path(__file__).resolve().parents[2]

_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:(?!//)\S+")


def prepare() -> None:
    """Bind our packages to the folder that this file lies in; the working directory comes last.

    Environments, builders and reward functions by import path may lie there.

    Raises `ImportError` with one sentence when another module was imported under such a name.
    """
    for name in PACKAGES:
        home = _ROOT / name / "__init__.py"
        known = sys.modules.get(name)
        if known is None:
            _load(name, home)
        elif Path(getattr(known, "__file__", None) or "").resolve() != home:
            where = getattr(known, "__file__", None) or ", ".join(known.__path__)
            raise ImportError(
                f"{where} was imported as {name!r}, the name of a package of EARL: rename it, or "
                "take its folder out of PYTHONPATH"
            )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


_looking = False


@contextmanager
def looking() -> Iterator[None]:
    """Import nothing meanwhile that a run file names, nor what lies in the working directory."""
    global _looking
    before, path = _looking, sys.path[:]
    _looking = True
    here = Path.cwd()
    if here != _ROOT:
        sys.path[:] = [each for each in path if Path(each or ".").resolve() != here]
    try:
        yield
    finally:
        _looking, sys.path[:] = before, path


def only_looks() -> bool:
    """Tell whether this process imports nothing that a run file names."""
    return _looking


def is_foreign(path: str) -> bool:
    """Tell whether it is an import path that leads out of EARL's core."""
    return _IMPORT_PATH.fullmatch(path) is not None and path.partition(".")[0] != "earl_core"


def bare(found: Any) -> Any:
    """A class or function without the options that it was bound to."""
    while isinstance(found, partial):
        found = found.func
    return found


def refuse_library(found: Any, path: str, what: str) -> None:
    """Raise `ConfigError` for what is of Python's own, where none was made for this: a class, a
    function, or an object that can be called, and methods of them."""
    made = bare(found)
    owner = getattr(made, "__self__", None) or getattr(made, "__objclass__", None)
    if owner is not None and not isinstance(owner, types.ModuleType):
        made = owner if isinstance(owner, type) else type(owner)
    home = getattr(made, "__module__", None)
    if home == "types" and not hasattr(types, getattr(made, "__name__", "")):
        return  # `types.new_class` and `make_dataclass` know no better
    if str(home).partition(".")[0] in sys.stdlib_module_names:
        raise ConfigError(
            f"{what} {path!r} is of Python's standard library, which has none",
            remedy="name one of your own",
        )


def import_object(path: str, what: str) -> Any:
    """Import the object `package.module:name`. Raises `ConfigError`, which calls it `what`."""
    module, _, name = path.partition(":")
    if not (module and name):
        raise ConfigError(f"{what} is {path!r}", remedy="write an import path, package.module:name")
    if module.partition(".")[0] in ("flows", "tasks"):
        raise ConfigError(
            f"{what} {path!r}: EARL has a package of that name itself", remedy="rename the module"
        )
    if _looking and is_foreign(path):
        raise ConfigError(
            f"{what} {path!r} is code that a run file names, which this command does not import"
        )
    try:
        return load_object(path)
    except Exception as error:  # code of others runs, and may raise anything
        raise ConfigError(
            f"{what} {path!r} cannot be imported: {type(error).__name__}: {error}",
            remedy="check the path, and that its package is installed or in the working directory",
        ) from error


def import_package(module: str, package: str) -> Any:
    """A module of a package that the hosts' Python may lack. Raises `ConfigError` if it does.
    package: what one installs, such as "reasoning-gym"."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{sys.executable} has no package {package} ({error})",
            remedy="install it there, or name by environment.python an interpreter that has it",
        ) from error


def load_object(path: str) -> Any:
    """Import the object that `package.module:name` names. Raises whatever importing it raises."""
    module, _, name = path.partition(":")
    if not (module and name):
        raise ImportError(f"{path!r} is no import path: write package.module:Class")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _load(name: str, home: Path) -> None:
    folder = [str(home.parent)]
    found = importlib.util.spec_from_file_location(name, home, submodule_search_locations=folder)
    if found is None or found.loader is None:
        raise ImportError(f"{home} is missing: install EARL again")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def installed(name: str) -> str | None:
    """The version of an installed package, None when it is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
