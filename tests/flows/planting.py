"""Differences that are planted into a run while it trains, each in one stage of iteration 1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from earl_core.dispatch import Manifest
from earl_core.rollout import group_worker
from earl_core.run import RunDirectory
from earl_core.trajectory.samples import derive_seed

ITERATION = 1
HIGH_BIT = 0x40
"""Of a float32's third byte: it halves or doubles the number."""


@contextmanager
def planted(what: str) -> Iterator[None]:
    """`seed`: the rollout draws otherwise. `bit`: one bit of its shard changes after the seal."""
    if what == "seed":
        with mock.patch.object(group_worker, "derive_seed", _other_seed):
            yield
    elif what == "bit":
        with mock.patch.object(RunDirectory, "seal", _flipping(RunDirectory.seal)):
            yield
    else:
        yield


def _other_seed(*parts: Any) -> int:
    return derive_seed(*parts, *(["other"] if parts[1] == ITERATION else []))


def _flipping(seal: Any) -> Any:
    def sealing(run: RunDirectory, manifest: Manifest) -> Manifest:
        sealed: Manifest = seal(run, manifest)
        if (sealed.iteration, sealed.stage) == (ITERATION, "rollout"):
            flip_a_logprob(run, sealed)
        return sealed

    return sealing


def flip_a_logprob(run: RunDirectory, sealed: Manifest) -> None:
    """Flip a bit of the first log-prob that is not 0."""
    entry = sealed.shards[0]
    start, length = entry.columns["rollout_logprobs"].values
    path = run.store.path(entry)
    with path.open("r+b") as file:
        file.seek(start)
        values = file.read(length)
        place = next(at for at in range(0, length, 4) if any(values[at : at + 4])) + 2
        file.seek(start + place)
        file.write(bytes([values[place] ^ HIGH_BIT]))
