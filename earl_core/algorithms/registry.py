"""A registry of interchangeable algorithms, built from plain configuration.

Every registered thing is a frozen pydantic model whose fields are its parameters, so a name and
its parameters are checked by the process that reads the configuration, without importing torch.
Adding an algorithm touches one file: subclass the family's base class, decorate it, done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from earl_core.system.errors import ConfigError
from earl_core.system.import_path import import_object, is_foreign, only_looks
from earl_core.system.similar import meant


class Registered(BaseModel):
    """Base of everything a :class:`Registry` holds: immutable, unknown and non-finite parameters
    refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, serialize_by_alias=True
    )


T = TypeVar("T", bound=Registered)
ClassT = TypeVar("ClassT", bound=type[Registered])


class Registry(Generic[T]):
    """Names for the implementations of one family (advantage estimators, policy losses, ...).

    Args:
        kind: What one member is called in error messages, e.g. ``"policy loss"``.
        base: The class every member derives from.
    """

    def __init__(self, kind: str, base: type[T]) -> None:
        self.kind = kind
        self._base = base
        self._classes: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[ClassT], ClassT]:
        """Class decorator that makes a subclass of the family's base available as ``name``."""

        def add(cls: ClassT) -> ClassT:
            if name in self._classes:
                raise ValueError(f"the {self.kind} name {name!r} is taken: choose another name")
            self._classes[name] = self._checked(cls, name)
            return cls

        return add

    def names(self) -> tuple[str, ...]:
        """The registered names, sorted."""
        return tuple(sorted(self._classes))

    def build(self, spec: str | Mapping[str, Any]) -> T:
        """Build a member from ``{"name": name, **parameters}``, or the bare name for its defaults.

        ``name`` is a registered name or an import path ``package.module:Class``. A class named by
        path is imported where the configuration is read: import torch inside its functions.

        Raises:
            ConfigError: Unknown name, failing import, unknown or invalid parameter.
        """
        parameters = {"name": spec} if isinstance(spec, str) else dict(spec)
        name = parameters.pop("name", None)
        if not isinstance(name, str) or not name:
            raise ConfigError(f"a {self.kind} needs a `name`: {self._choices()}")
        cls = self.resolve(name)
        try:
            return cls(**parameters)
        except (ValidationError, TypeError) as error:
            raise ConfigError(self._explain(name, cls, error)) from error

    def checked(self, spec: Mapping[str, Any]) -> T | None:
        """Build a member as `build` does; None for a class of somebody's own in a process that only
        looks."""
        if only_looks() and is_foreign(str(spec.get("name"))):
            return None
        return self.build(spec)

    def resolve(self, name: str) -> type[T]:
        """The class of a registered name or an import path. Raises `ConfigError`."""
        if name in self._classes:
            return self._classes[name]
        if ":" not in name:
            near = meant(name, self._classes)
            raise ConfigError(f"there is no {self.kind} named {name!r}: {near}{self._choices()}")
        return self._checked(import_object(name, f"the {self.kind}"), name)

    def _checked(self, found: Any, name: str) -> type[T]:
        if isinstance(found, type) and issubclass(found, self._base):
            return found
        raise ConfigError(
            f"the {self.kind} {name!r} must be a subclass of "
            f"{self._base.__module__}:{self._base.__qualname__}"
        )

    def _choices(self) -> str:
        names = ", ".join(self.names())
        return f"choose one of {names}, or give an import path package.module:Class"

    def _explain(self, name: str, cls: type[T], error: Exception) -> str:
        fields = cls.model_fields.items()
        known = ", ".join(field.alias or key for key, field in fields) or "none"
        if not isinstance(error, ValidationError):
            return f"the {self.kind} {name!r} cannot be built: {error} (its parameters: {known})"
        problems = "; ".join(
            f"{'.'.join(map(str, item['loc'])) or name}: {item['msg']} (got {item['input']!r})"
            for item in error.errors(include_url=False)
        )
        return (
            f"the {self.kind} {name!r} has wrong parameters: {problems} (its parameters: {known})"
        )
