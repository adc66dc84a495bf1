"""Numbers as environments, agents and reward functions give them. Standard library only."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from numbers import Real
from typing import Any

from earl_core.environments.base import LARGEST_NUMBER
from earl_core.system.frames import WireError


def real_number(value: Any) -> float:
    """A real number as a float; NaN for what is none, infinity for what is too large.

    Python's and numpy's numbers and truth values count, those of the standard library's decimal and
    fractions, and arrays and tensors of no dimension that hold one.
    """
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        try:
            value = value.item()
        except (TypeError, ValueError, RuntimeError):
            return math.nan
    try:
        return float(value) if isinstance(value, Real | Decimal) else math.nan
    except (OverflowError, ValueError):
        # A signalling NaN of Decimal is a ValueError.
        return math.inf if isinstance(value, Real) else math.nan


_NO_NUMBER = re.compile(r"must (be|return) a finite number")


def is_no_number(failure: str) -> bool:
    """Tell whether what a failed call says is that its number was none, NaN, infinite or too
    large."""
    return _NO_NUMBER.search(failure) is not None


def invalid_rewards(failures: Mapping[str, int]) -> int:
    """Count the failures whose number was none. failures: how often by what they say."""
    return sum(count for said, count in failures.items() if is_no_number(said))


def checked_number(what: str, value: Any) -> float:
    """A number that sums and columns can hold. what: it is; raises `WireError` with it."""
    number = real_number(value)
    # Not so for NaN either.
    if not abs(number) <= LARGEST_NUMBER:
        raise WireError(
            f"{what} must be a finite number between {-LARGEST_NUMBER:g} and {LARGEST_NUMBER:g}, "
            f"not {_shown(value)}: scale it, or leave it out."
        )
    return number


def _shown(value: Any) -> str:
    # Text of a very long integer is refused by the interpreter.
    large = isinstance(value, int) and abs(value) > LARGEST_NUMBER
    return "a larger integer" if large else f"{value!r:.200}"
