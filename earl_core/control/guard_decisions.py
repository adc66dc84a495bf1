"""The guard's decisions of a run's past, as its seals have them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from pydantic import ValidationError

from earl_core.dispatch import ManifestError
from earl_core.guard.decision import Decision, decision_of
from earl_core.run import RunDirectory

_READ = 50


def found_in(run: RunDirectory, through: int) -> dict[int, Decision]:
    """The decisions with a finding of the iterations up to one, as far as they can be read."""
    lines = [each for each in run.numbers.read() if each["iteration"] < through]
    numbers = [int(each["iteration"]) for each in lines if each.get("guard/findings")]
    read = decisions_of(run, [*numbers[-_READ:], through])
    return {number: each for number, each in read.items() if each.findings}


def decisions_of(run: RunDirectory, iterations: Iterable[int]) -> dict[int, Decision]:
    """The decisions of these iterations, as far as they can be read."""
    found = {}
    for number in iterations:
        # What cannot be read says nothing.
        with suppress(ManifestError, ValidationError):
            decision = decision_of(run.manifest(number, "advantage"))
            found[number] = decision
    return found
