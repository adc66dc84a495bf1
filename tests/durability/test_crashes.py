"""A run's life with each of its I/O calls failing, or ended there by a kill or a power cut."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.durability.crash_sweep import KINDS

ROOT = Path(__file__).parents[2]


def run(*command: str) -> dict[str, Any]:
    ended = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT, timeout=500, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


EVERY = {"kill": 5, "EIO": 11, "ENOSPC": 7, "EMFILE": 5, "short": 2}
"""One of so many calls fails in the fast tests, where all of them would take minutes."""


def sweep(every: dict[str, int]) -> dict[str, Any]:
    """What a sweep of each kind found."""
    return run("tests.durability.crash_sweep", *(f"{kind}={n}" for kind, n in every.items()))


def check(kind: str, every: int, found: dict[str, Any]) -> None:
    # A whole life makes about 370 calls; one that makes few tests little.
    assert found["calls"] > 200
    assert found["failed"] >= (200 if KINDS[kind] is None else 30) // every
    assert sum(found["ends"].values()) == found["failed"]
    assert found["ends"].get("killed", 0) == (found["failed"] if kind == "kill" else 0)


@pytest.fixture(scope="module")
def swept() -> dict[str, Any]:
    return sweep(EVERY)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_whatever_happens_at_an_io_call(kind: str, swept: dict[str, Any]) -> None:
    check(kind, EVERY[kind], swept[kind])


@pytest.mark.campaign
def test_a_run_goes_on_whatever_happens_at_any_io_call() -> None:
    every = {kind: 1 for kind, number in EVERY.items() if number > 1}
    for kind, found in sweep(every).items():
        check(kind, 1, found)


def test_a_run_goes_on_after_a_power_cut_at_a_write() -> None:
    """At every third, with some of what was not synced, and without."""
    assert run("tests.durability.power_cuts", "1", "3")["cuts"] > 50


@pytest.mark.campaign
def test_a_run_goes_on_after_a_power_cut_at_any_write() -> None:
    assert run("tests.durability.power_cuts", "1")["cuts"] > 150
