"""Environment options: strict pydantic models with messages that say what to change."""

from __future__ import annotations

import sys
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
            f"the options of environment {environment!r} are wrong:\n  " + "\n  ".join(lines)
        ) from error


def lacking(package: str, error: ImportError) -> ConfigError:
    """What is raised where the hosts' Python has not what an adapter needs."""
    return ConfigError(
        f"{sys.executable} has no package {package} ({error})",
        remedy=f"install it there, {sys.executable} -m pip install {package}, or name by "
        "environment.python an interpreter that has it",
    )


def _line(model: type[Options], item: Any) -> str:
    path = ".".join(str(part) for part in item["loc"]) or "(all)"
    if item["type"] == "extra_forbidden":
        known = _fields_at(model, item["loc"][:-1])
        return f"unknown option {path!r}: use one of {', '.join(sorted(known))}"
    if item["type"] == "missing":
        return f"option {path!r} is missing: add it"
    return redact(f"option {path!r}: {item['msg']} (it is {item['input']!r})")


def _fields_at(model: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    for part in path:
        field = model.model_fields.get(str(part))
        annotation = None if field is None else field.annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)
