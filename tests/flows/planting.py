"""What is planted into a run while it trains: differences, each in one stage of iteration 1, and
decisions of the guard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from earl_core.control.run_controller import RunController
from earl_core.dispatch import Manifest
from earl_core.guard.decision import Decision
from earl_core.rollout import group_worker
from earl_core.run import RunDirectory
from earl_core.trajectory.samples import derive_seed
from tasks import advantage

ITERATION = 1


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


@contextmanager
def decided(decisions: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Have the guard decide so: each with its `iteration`, and `branch` if it is of one, and the
    fields of `Decision`; else as it does."""
    diagnose = advantage.diagnose

    def deciding(
        controller: RunController, iteration: int, manifests: Mapping[str, Manifest]
    ) -> Decision:
        branch = controller.run.branches.at(iteration)
        place = iteration, 0 if branch is None else branch.number
        for each in decisions:
            given = dict(each)
            if (given.pop("iteration"), given.pop("branch", 0)) == place:
                return Decision.model_validate(given)
        return diagnose(controller, iteration, manifests)

    with mock.patch.object(advantage, "diagnose", deciding):
        yield


def _other_seed(*parts: Any) -> int:
    return derive_seed(*parts, *(["other"] if parts[1] == ITERATION else []))


def _flipping(seal: Any) -> Any:
    def sealing(run: RunDirectory, manifest: Manifest) -> Manifest:
        sealed: Manifest = seal(run, manifest)
        if (sealed.iteration, sealed.stage) == (ITERATION, "rollout"):
            flip_a_mask(run, sealed)
        return sealed

    return sealing


def flip_a_mask(run: RunDirectory, sealed: Manifest) -> None:
    """Flip the bit that says that the first sampled token is trained."""
    entry = sealed.shards[0]
    start, length = entry.columns["loss_mask"].values
    with run.store.path(entry).open("r+b") as file:
        file.seek(start)
        place = file.read(length).index(1)
        file.seek(start + place)
        file.write(b"\0")
