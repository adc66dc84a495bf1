"""A placement of one's own trains and is imported again; and what moves between the stages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest

from earl_core.cluster.host import local_hosts
from earl_core.config import RunConfig, load_config
from earl_core.control.stage_moves import Move, Reader
from earl_core.control.stage_places import Site
from earl_core.deployment.plan import DeploymentPlan
from earl_core.deployment.stages import STAGES
from earl_core.dispatch import Manifest, read_manifest
from earl_core.learner.data.samples import RowCost
from earl_core.pretrained.model_directory import read_model_shape
from earl_core.selector.choice.selection import SelectionInput
from earl_core.weights.manifest import WeightsManifest
from flows.cli.plan_file import explanation, past_explanation
from tests.flows.runs import Runs

OWN = ("stages.placement=tests.flows.placements:APART", "deadlines.repeats=0")


def test_one_of_ones_own_has_the_bits_of_the_built_in_ones(
    runs: Runs, undisturbed: Callable[..., Runs]
) -> None:
    """Killed, and resumed with another version of it, whose plan is made anew. It imitates
    `separate`, which has the bits of the default (`test_layouts`)."""
    runs.train(*OWN, fault="update.step0@1=kill", expect=1)
    runs.wait_for_workers_to_end()
    runs.environment["EARL_TEST_THREADS"] = "2"
    runs.train(*OWN)
    runs.assert_learnt()
    assert [runs.weights(k) for k in (0, 1)] == [undisturbed().weights(k) for k in (0, 1)]
    sealed = runs.executed("sealed")
    assert [sealed.count((k, "select")) for k in (0, 1)] == [1, 2]
    assert sealed.count((1, "rollout")) == 1
    assert runs.shared_memory() == []


HOSTS = (
    "iterations=1",
    "cluster.hosts=2",
    "stages={rollout: {replicas: 2}, update: {replicas: 2}}",
    "experience.ranks=2",
    # What it would skip nobody knows before.
    "update.zero_advantage=compute",
)


def test_what_is_said_to_move_has_moved(runs: Runs) -> None:
    """Over two hosts, to the byte: of the sealed manifests, and of a load like theirs."""
    runs.train(*HOSTS)
    runs.assert_learnt()
    config = load_config(runs.config, list(HOSTS))
    sealed = {
        path.stem: read_manifest(path)
        for path in (runs.run() / "iterations" / "000000").glob("*.json")
        if path.stem in STAGES
    }
    plan = DeploymentPlan.model_validate(sealed["select"].outputs["plan"])
    hosts = local_hosts(2)
    site = Site(config, plan, [h.name for h in hosts], [h.resources for h in hosts])
    reader = Reader(config, site, RowCost.of(read_model_shape(runs.model)))
    (line,) = runs.metrics()
    moves, received = reader.moves(sealed), Counter[str]()
    for move in moves:
        received[move.to] += move.received
    assert received.keys() == {"reward", "reference", "advantage", "update"}
    assert received == {stage: line[f"{stage}/remote_bytes"] for stage in received}
    assert min(received.values()) > 0
    folder = runs.run() / "iterations" / "000000"
    given = SelectionInput.model_validate_json((folder / "selection.input").read_bytes())
    past = past_explanation(runs.run(), given, plan)
    assert past.moves[:-1] == moves
    assert [m[:3] for m in past.moves[-1:]] == [("next rollout", "publish", ("weights",))]
    assert {seat.host for seat in past.seats} == set(site.names)
    # An iteration under way tells of what has been read so far.
    (folder / "update.json").rename(folder / "update.gone")
    assert past_explanation(runs.run(), given, plan).moves[:-1] == [
        move for move in moves if move.to != "update"
    ]
    assert_expected(config, site, moves, sealed)


def assert_expected(
    config: RunConfig, site: Site, moves: list[Move], sealed: dict[str, Manifest]
) -> None:
    """Before the run `earl plan` says the same, for episodes of this mean length; what is said in
    them aside."""
    rows = sum(entry.rows for entry in sealed["rollout"].shards)
    assert rows == config.rollout.episodes_per_iteration
    tokens = sum(sum(entry.row_lengths) for entry in sealed["rollout"].shards)
    told = explanation(config, "here", None, str(round(tokens / rows)))
    assert told.site.plan.stages == site.plan.stages
    assert (told.site.names, told.seats) == (site.names, site.seats())
    *columns, weights = told.moves
    assert [(m.to, m.of, m.columns, m.reads) for m in columns] == [
        (m.to, m.of, m.columns, m.reads) for m in moves
    ]
    for expected, real in zip(columns, moves, strict=True):
        if expected.columns in (("advantages",), ("reference_logprobs",)):
            both = [move.here + move.received for move in (expected, real)]
            assert both[0] == pytest.approx(both[1], rel=0.1)
    published = WeightsManifest.model_validate(sealed["publish"].outputs["weights"])
    size = sum(4 * math.prod(each.shape) for each in published.tensors.values())
    assert (weights.here, weights.received) == (2 * size, 0)
