"""The signature of a function as its source has it: nothing is imported, and nothing run."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path

from earl_core.system.errors import ConfigError
from earl_core.system.outside import read_text


def written_signature(path: str) -> inspect.Signature | None:
    """The signature of `package.module:function`, whose defaults are all None; no signature where
    the source does not say it: it was not found, or something else than a plain function has the
    name."""
    module, _, name = path.partition(":")
    try:
        tree = ast.parse(_source(module))
    except (OSError, SyntaxError, ValueError, ConfigError):
        return None
    named = [each for each in tree.body if name in _bound(each)]
    if len(named) != 1 or not isinstance(named[0], ast.FunctionDef) or named[0].decorator_list:
        return None
    return _signature(named[0].args)


def _source(module: str) -> str:
    """Raises `OSError` where there is none."""
    place = Path(*module.split("."))
    # Ours may be found in other ways than by the path.
    own = getattr(sys.modules.get(place.parts[0]), "__path__", ())
    folders = [Path(each).parent for each in own] or [Path(each or ".") for each in sys.path]
    files = [(each / place).with_suffix(".py") for each in folders]
    for file in [*files, *(each / place / "__init__.py" for each in folders)]:
        if file.is_file():
            return read_text(file, str(file))
    raise FileNotFoundError(module)


def _bound(statement: ast.stmt) -> set[str | None]:
    """Names that a statement of a module may bind."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    found: set[str | None] = set()
    for each in ast.walk(statement):
        found |= {getattr(each, "name", None), getattr(each, "asname", None)}
        if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load):
            found.add(each.id)
    return found


def _signature(given: ast.arguments) -> inspect.Signature:
    kinds = inspect.Parameter
    plain = [*given.posonlyargs, *given.args]
    needed = len(plain) - len(given.defaults)
    found = [
        kinds(
            each.arg,
            kinds.POSITIONAL_ONLY if at < len(given.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD,
            default=kinds.empty if at < needed else None,
        )
        for at, each in enumerate(plain)
    ]
    if given.vararg:
        found.append(kinds(given.vararg.arg, kinds.VAR_POSITIONAL))
    for each, value in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        default = kinds.empty if value is None else None
        found.append(kinds(each.arg, kinds.KEYWORD_ONLY, default=default))
    if given.kwarg:
        found.append(kinds(given.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(found)
