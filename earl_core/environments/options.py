"""Environment options: frozen dataclasses, checked with messages that say what to change.

Standard library only, because environments run under Pythons that have nothing else of ours.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
from collections.abc import Mapping
from typing import (
    Any,
    Literal,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from earl_core.secrets import redact
from earl_core.system.errors import ConfigError
from earl_core.system.similar import meant


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Options:
    """Base of all options: a class with annotated fields becomes a frozen dataclass.

    A field is a text, a number, a truth value, None, a `Literal`, a mapping by text, a tuple, a
    union of these, `Any`, or options again. A `__post_init__` checks more and raises ValueError.
    """

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)


OptionsT = TypeVar("OptionsT", bound=Options)


def parse_options(model: type[OptionsT], options: Mapping[str, Any], environment: str) -> OptionsT:
    """Returns `options` as `model`. Raises ConfigError with one line for each wrong option."""
    try:
        parsed: OptionsT = _checked(model, options, "")
        return parsed
    except _Wrong as wrong:
        raise ConfigError(
            f"the options of environment {environment!r} are wrong:\n  " + "\n  ".join(wrong.lines)
        ) from None


def at_least(name: str, value: float, least: float) -> None:
    """Raises ValueError, with the option's name, when `value` is below `least`."""
    if value < least:
        raise ValueError(f"{name} is {value}: give {least} or more")


def check_pattern(name: str, pattern: str) -> None:
    """Raises ValueError unless `pattern` is a regular expression with at most one group."""
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"{name} is no regular expression: {error}; correct it") from error
    if groups > 1:
        raise ValueError(f"{name} has several groups: use one, or none, for what is meant")


class _Wrong(Exception):
    def __init__(self, *lines: str) -> None:
        super().__init__(*lines)
        self.lines = lines


def _checked(hint: Any, value: Any, path: str) -> Any:
    """`value` as `hint` has it: options for a mapping, a tuple for a list. Raises `_Wrong`."""
    if isinstance(hint, type) and issubclass(hint, Options):
        return _as_options(hint, value, path)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _as_one_of(arguments, value, path)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(
            _checked(arguments[0], each, f"{path}.{index}") for index, each in enumerate(value)
        )
    if origin is dict and isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _checked(arguments[1], each, f"{path}.{key}") for key, each in value.items()}
    if origin is Literal and any(value == each and type(value) is type(each) for each in arguments):
        return value
    if hint is Any or (hint in (str, int, bool, type(None)) and type(value) is hint):
        return value
    if hint is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    raise _refused(path, _described(hint), value, (hint,))


def _as_options(model: type[Options], value: Any, path: str) -> Options:
    if not isinstance(value, Mapping):
        raise _Wrong(redact(f"option {path!r} must be a mapping (it is {value!r})"))
    prefix = f"{path}." if path else ""
    fields = {field.name: field for field in dataclasses.fields(model)}  # type: ignore[arg-type]
    hints, lines, values = get_type_hints(model), [], {}
    for key, each in value.items():
        if key not in fields:
            known = ", ".join(sorted(fields))
            near = meant(key, fields)
            lines.append(f"unknown option {f'{prefix}{key}'!r}: {near}use one of {known}")
            continue
        try:
            values[key] = _checked(hints[key], each, f"{prefix}{key}")
        except _Wrong as wrong:
            lines += wrong.lines
    for name, field in fields.items():
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and name not in value:
            lines.append(f"option {f'{prefix}{name}'!r} is missing: add it")
    if lines:
        raise _Wrong(*lines)
    try:
        return model(**values)
    except ValueError as error:
        raise _Wrong(redact(f"option {prefix}{error}")) from None


def _as_one_of(hints: tuple[Any, ...], value: Any, path: str) -> Any:
    failed = []
    for hint in hints:
        try:
            return _checked(hint, value, path)
        except _Wrong as wrong:
            failed.append(wrong)
    # A mapping or list that no choice takes: what is wrong inside it says more.
    inside = [each for hint, each in zip(hints, failed, strict=True) if _takes(hint, value)]
    if len(inside) == 1:
        raise inside[0]
    described = " or ".join(_described(hint) for hint in hints)
    raise _refused(path, described, value, hints)


def _refused(path: str, described: str, value: Any, hints: tuple[Any, ...]) -> _Wrong:
    words = [str(each) for hint in hints if get_origin(hint) is Literal for each in get_args(hint)]
    near = meant(value, words).strip()
    told = f"option {path!r} must be {described} (it is {value!r})"
    return _Wrong(redact(f"{told}: {near}" if near else told))


def _takes(hint: Any, value: Any) -> bool:
    """Tell whether `value` has the outer form of `hint`."""
    if isinstance(value, Mapping):
        return get_origin(hint) is dict or (isinstance(hint, type) and issubclass(hint, Options))
    return isinstance(value, (list, tuple)) and get_origin(hint) is tuple


_NAMES = {
    str: "a text",
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    type(None): "null",
}


def _described(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(repr(each) for each in arguments)
    if origin is tuple:
        return "a list"
    return _NAMES.get(hint, "a mapping")
