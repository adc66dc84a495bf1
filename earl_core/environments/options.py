"""Environment options: strict pydantic models with messages that say what to change."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from earl_core.secrets import redact
from earl_core.system.errors import ConfigError


class Options(BaseModel):
    """Base of all option models: unknown keys, NaN and infinity are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True
    )


OptionsT = TypeVar("OptionsT", bound=Options)


def parse_options(model: type[OptionsT], options: Mapping[str, Any], environment: str) -> OptionsT:
    """Returns `options` as `model`.

    Raises ConfigError with one line for each wrong option.
    """
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        lines = [_line(model, item) for item in error.errors()]
        raise ConfigError(
            f"The options of environment {environment!r} are wrong:\n  " + "\n  ".join(lines)
        ) from error


def _line(model: type[Options], item: Any) -> str:
    path = ".".join(str(part) for part in item["loc"]) or "(all)"
    if item["type"] == "extra_forbidden":
        known = _fields_at(model, item["loc"][:-1])
        return f"unknown option {path!r}; known here: {', '.join(sorted(known))}."
    if item["type"] == "missing":
        return f"option {path!r} is missing; add it."
    return redact(f"option {path!r}: {item['msg']} (it is {item['input']!r}).")


def _fields_at(model: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    for part in path:
        field = model.model_fields.get(str(part))
        annotation = None if field is None else field.annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)


def import_object(path: str, what: str) -> Any:
    """Imports `pkg.mod:name`. `what` names the option in messages.

    Raises ConfigError when the path is malformed, the module does not import or has no
    such name.
    """
    module_name, separator, name = path.partition(":")
    if not separator or not module_name or not name:
        raise ConfigError(f"{what} is {path!r}; write an import path like 'package.module:name'.")
    if module_name.partition(".")[0] in ("flows", "tasks"):
        raise ConfigError(
            f"{what} {path!r}: EARL has a package of that name itself. Rename the module."
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{what} {path!r} cannot be imported: {type(error).__name__}: {error}. Check that the "
            f"module is installed or in the working directory."
        ) from error
    try:
        return getattr(module, name)
    except AttributeError as error:
        raise ConfigError(
            f"{what} {path!r}: module {module_name!r} has no {name!r}. Correct the name after ':'."
        ) from error
