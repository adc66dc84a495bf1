"""The base of every pydantic model: frozen, and unknown keys are errors."""

from __future__ import annotations

import math
import os
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict


class Settings(BaseModel):
    """A frozen pydantic model that refuses keys it does not know, and numbers that are not finite:
    it is stored as JSON, which has none."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        # What is wrong may be a secret.
        hide_input_in_errors=True,
    )


def _check_stored(value: Any, key: str, around: tuple[int, ...] = ()) -> None:
    """Raise `ValueError` for a value that would come back from a run directory as another one."""
    if value is None or isinstance(value, bool | int | str):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{key} is {value}: give it a finite number")
    elif not isinstance(value, dict | list):
        raise ValueError(
            f"{key} is of type {type(value).__name__}, which cannot be stored with the run: use "
            "text (in quotes), a number, true, false, null, a list or a mapping"
        )
    elif id(value) in around:
        raise ValueError(f"{key} contains itself: write its value out")
    elif isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise ValueError(f"{key} has the key {name!r}, which is not text: put it in quotes")
            _check_stored(item, f"{key}.{name}" if key else name, (*around, id(value)))
    else:
        for number, item in enumerate(value):
            _check_stored(item, f"{key}.{number}", (*around, id(value)))


def _check_options(value: dict[str, Any]) -> dict[str, Any]:
    _check_stored(value, "")
    return value


Options = Annotated[dict[str, Any], AfterValidator(_check_options)]
"""Keys that only their user knows, with values that JSON holds exactly."""


Place = Annotated[str, AfterValidator(os.path.expanduser)]
"""A directory; `~` is the user's home, as a shell reads it, and never a folder of that name."""


WholePath = Annotated[Place, AfterValidator(os.path.abspath)]
"""A file, by its whole path: it is looked for from other working directories, too."""
