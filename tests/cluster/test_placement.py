"""Placements: pure answers about devices, cores and who makes room, and a target in its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from earl_core.cluster.placed_rank import build
from earl_core.cluster.rank_process import WorkerContext
from earl_core.cluster.worker_group import WorkerGroup
from earl_core.deployment.placement import PLACEMENTS, Assignment, find_placement
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.deployment.stages import PLACED
from earl_core.system.errors import ConfigError
from earl_core.system.hardware import HostResources

COLOCATED, SEPARATE = find_placement("colocated"), find_placement("separate")
EIGHT = HostResources(cores=tuple(range(8)), gpus=8)


def test_colocated_stages_use_all_devices_in_turn() -> None:
    assert COLOCATED.needed(2, 4) == 4
    assert COLOCATED.threads(8, 2, 4) == (4, 2)
    two_engines = StageDeployment("rollout", 2, 2)
    assert COLOCATED.place(two_engines, 1, EIGHT) == Assignment((2, 3), (2, 3))
    mesh = StageDeployment("update", shard=4, threads=2)
    assert COLOCATED.place(mesh, 0, EIGHT) == Assignment((), (0, 1, 2, 3))
    engine = StageDeployment("rollout", threads=3)
    assert COLOCATED.place(engine, 0, EIGHT) == Assignment((), (0,))
    assert COLOCATED.gives_way("rollout") == ("reference", "update")
    assert COLOCATED.gives_way("update") == ("rollout", "reference")
    assert COLOCATED.gives_way("experience") == ()


def test_separate_stages_have_their_own() -> None:
    assert SEPARATE.needed(2, 4) == 6
    assert SEPARATE.threads(8, 2, 4) == (1, 1)
    engine = StageDeployment("rollout", tensor_parallel=2, threads=2)
    assert SEPARATE.place(engine, 0, EIGHT) == Assignment((0, 1, 2, 3), (0, 1))
    mesh = StageDeployment("update", shard=2, threads=2)
    assert SEPARATE.place(mesh, 0, EIGHT) == Assignment((4, 5, 6, 7), (6, 7))
    assert not any(SEPARATE.gives_way(role) for role in PLACED)


@given(
    name=st.sampled_from(sorted(PLACEMENTS)),
    engines=st.integers(1, 4),
    width=st.integers(1, 4),
    ranks=st.integers(1, 8),
    cores=st.integers(1, 64),
)
def test_what_works_at_the_same_time_shares_nothing(
    name: str, engines: int, width: int, ranks: int, cores: int
) -> None:
    placement = find_placement(name)
    devices = engines * width
    needed = placement.needed(devices, ranks)
    site = HostResources(tuple(range(cores)), needed)
    threads = placement.threads(cores, devices, ranks)
    rollout = StageDeployment("rollout", engines, width, threads=threads[0])
    places = [placement.place(rollout, member, site) for member in range(engines)]
    if name == "separate":
        update = StageDeployment("update", ranks, threads=threads[1])
        places.append(placement.place(update, 0, site))
    gpus = [gpu for place in places for gpu in place.gpus]
    assert len(gpus) == len(set(gpus)) == devices + (ranks if name == "separate" else 0)
    used = [core for place in places for core in place.cores]
    if cores >= needed:
        assert len(used) == len(set(used))


class Where:
    """Says where it runs."""

    def __init__(self, context: object, deployment: object, *, word: str) -> None:
        self._word = word

    def look(self) -> dict[str, object]:
        return {
            "word": self._word,
            "cores": sorted(os.sched_getaffinity(0)),
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        }


@pytest.mark.parametrize(("visible", "expected"), [(None, "2,3"), ("4,5,6,7", "6,7")])
def test_a_target_settles_in_its_place(tmp_path: Path, visible: str | None, expected: str) -> None:
    core = max(os.sched_getaffinity(0))
    group = WorkerGroup(
        "placed",
        "earl_core.cluster.placed_rank:build",
        log_directory=tmp_path,
        environment={"CUDA_VISIBLE_DEVICES": visible} if visible else {},
    )
    arguments = {
        "target": "tests.cluster.test_placement:Where",
        "assignments": [{"cores": [core], "gpus": [2, 3]}],
        "gpus_of_host": 4,
        "arguments": {"word": "here"},
    }
    try:
        # An engine counts its GPUs itself. A fork server that has loaded torch for another test
        # would have any other role's rank refuse GPUs that this host may lack.
        group.start({"stage": "rollout"}, arguments)
        (found,) = group.call("look", stage="", iteration=0, deadline_seconds=300)
    finally:
        group.stop()
    assert found == {"word": "here", "cores": [core], "gpus": expected}


@pytest.mark.parametrize(
    ("seen", "read", "assigned", "words"),
    [
        (True, 0, [], "planned for a CPU, because no NVIDIA driver"),
        (False, 4, [1], "planned for 4 GPUs on this host, and torch"),
        (True, 4, [1], None),
        (False, 0, [], None),
        # Roles without a device of their own may use none.
        (False, 4, [], None),
    ],
)
def test_a_plan_that_torch_contradicts_is_an_error(
    monkeypatch: pytest.MonkeyPatch, seen: bool, read: int, assigned: list[int], words: str | None
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    context = WorkerContext(0, 1, 0, "w", Path("log"))

    def make() -> object:
        return build(
            context,
            {},
            target="tests.cluster.test_placement:Where",
            assignments=[{"cores": [], "gpus": assigned}],
            gpus_of_host=read,
            arguments={"word": "here"},
        )

    if words is None:
        assert isinstance(make(), Where)
        return
    with pytest.raises(ConfigError, match=words):
        make()
