"""Update and reference groups of two ranks do what one rank does, whatever their mesh."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from earl_core.cluster.rpc import same_results
from earl_core.dispatch import Batch
from earl_core.dispatch.shards.manifest import Manifest, ShardEntry
from tests.learner.recorded import Recorded
from tests.learnt import assert_learnt

LEARNER = "earl_core.learner.update_worker:LearnerWorker"
REFERENCE = "earl_core.learner.model_worker:ReferenceWorker"
AGREED = ("policy_version", "digest", "steps_applied")
MESHES = [{"shard": 2}, {"tensor_parallel": 2}, {"context_parallel": 2}, {"replicas": 2}]
MEASURED = ("seconds", "peak", "per_second", "microbatches", "padding", "prefix", "imbalance")
"""Parts of the names of metrics of time and memory, and of how the samples were packed."""


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Recorded]:
    made = Recorded.make(tmp_path)
    yield made
    made.close()


def deployment(**degrees: int) -> dict[str, Any]:
    return {"stage": "update", "threads": 1, **degrees}


def site(iteration: int) -> dict[str, Any]:
    return {"stage": "update", "iteration": iteration, "deadline_seconds": 120}


def weights_of(manifest: dict[str, Any]) -> dict[str, torch.Tensor]:
    return load_file(manifest["files"][0]["path"])


def shards(recorded: Recorded, entries: list[dict[str, Any]], column: str) -> dict[int, Any]:
    """The column of every row of the shards."""
    parsed = tuple(ShardEntry.model_validate(entry) for entry in entries)
    manifest = Manifest(
        run="0123456789ab", iteration=0, stage="s", key="", policy_version=0, shards=parsed
    )
    with Batch(recorded.store, [manifest]) as batch:
        return {int(row): batch.row(column, number).copy() for number, row in enumerate(batch.rows)}


def assert_same_metrics(found: dict[str, float], wanted: dict[str, float]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if not any(part in name for part in MEASURED):
            assert found[name] == pytest.approx(value, rel=2e-4, abs=2e-6), name


def assert_same_probe(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert sum(len(row["lengths"]) for row in wanted) > 20
    for one, other in zip(found, wanted, strict=True):
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=2e-5)
        assert {**one, "logprobs": ()} == {**other, "logprobs": ()}


def test_two_ranks_train_as_one_through_changes_of_their_mesh(
    recorded: Recorded, tmp_path: Path
) -> None:
    """An update under each mesh, the state of one going live into the next."""
    alone, context = recorded.alone()
    group = recorded.group(LEARNER, deployment(**MESHES[0]))
    assert group.call("restore", checkpoint=None, **site(0)) == [{"policy_version": 0}] * 2
    pids = group.pids
    for pid in pids:
        # What is installed for other purposes does not slow the start; see
        # earl_core.pretrained.huggingface.
        mapped = Path(f"/proc/{pid}/maps").read_text()
        assert not any(f"/{name}/" in mapped for name in ("scipy", "sklearn", "pandas"))
    mine = {"directory": str(tmp_path / "mine"), "dtype": "float32"}
    theirs = {**mine, "directory": str(tmp_path / "theirs")}
    before = weights_of(alone.publish(policy_version=0, **mine))
    for k, mesh in enumerate(MESHES):
        if k:
            group.reshard(deployment(**mesh), **site(k))
        given = {"manifests": recorded.references(k), "checkpoint": None, "record": {}}
        context.iteration = k
        wanted = alone.update(**given)
        found = same_results(group.call("update", **given, **site(k)), AGREED)
        assert found["policy_version"] == wanted["policy_version"] == k + 1
        assert found["steps_applied"] == wanted["steps_applied"] == 2
        assert_same_metrics(found["metrics"], wanted["metrics"])
        old = shards(recorded, found["shards"], "old_logprobs")
        for row, values in shards(recorded, wanted["shards"], "old_logprobs").items():
            assert old.pop(row) == pytest.approx(values, abs=2e-5)
        assert not old
        assert found["prefixes"] == wanted["prefixes"]
        named = {"policy_version": k + 1, "prefixes": wanted["prefixes"]}
        own = alone.publish(**named, **mine)
        expected = weights_of(own)
        told = same_results(group.call("publish", **named, **theirs, **site(k)), ["digest"])
        assert_same_probe(told["probe"], own["probe"])
        assert_learnt([wanted["metrics"]["grad_norm"]], before, expected)
        before = expected
        published = weights_of(told)
        assert published.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (published[name] - tensor).abs().max() < 1e-6, (mesh, name)
    assert group.pids == pids
    assert group.deployment == deployment(**MESHES[-1])
    group.call("save", directory=str(tmp_path / "handoff"), **site(4))
    assert alone.restore(str(tmp_path / "handoff")) == {"policy_version": 4}
    again = alone.publish(policy_version=4, **mine)
    assert again["digest"] == told["digest"]


@pytest.mark.parametrize(
    "degrees",
    [{"replicas": 2}, pytest.param({"tensor_parallel": 2}, marks=pytest.mark.slow)],
    ids=["replicas", "tensor parallel"],
)
def test_two_ranks_score_as_one(recorded: Recorded, degrees: dict[str, int]) -> None:
    manifests = recorded.references(0, groups=3)
    alone, _ = recorded.alone()
    wanted = alone.update(manifests=manifests, checkpoint=None, record={})
    group = recorded.group(REFERENCE, {"stage": "reference", "threads": 1, **degrees})
    results = group.call("score_reference", manifests=manifests[:1], **site(0))
    entries = [entry for result in results for entry in result["shards"]]
    assert len(entries) == degrees.get("replicas", 1)
    found = shards(recorded, entries, "reference_logprobs")
    # What the policy scores before its first step is what the frozen one scores.
    for row, values in shards(recorded, wanted["shards"], "old_logprobs").items():
        assert found[row] == pytest.approx(values, abs=2e-5)
