"""Placements: pure answers about devices, cores and who makes room, and a target in its place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from earl_core.cluster.placed_rank import build
from earl_core.cluster.rank_process import WorkerContext
from earl_core.cluster.worker_group import WorkerGroup
from earl_core.config import parse_config
from earl_core.config.code import named_code
from earl_core.config.feasibility import check_devices
from earl_core.deployment.placement import (
    PLACEMENTS,
    Assignment,
    CheckedPlacement,
    find_placement,
)
from earl_core.deployment.shapes import Hardware
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.deployment.stages import PLACED
from earl_core.system.errors import ConfigError
from earl_core.system.hardware import HostResources
from earl_core.system.import_path import looking
from tests.config.test_config import with_

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


class _Own:
    """A placement of somebody's own, as `separate` on two devices unless it is told otherwise."""

    def __init__(self, devices: Any = ((0,), (1,)), threads: Any = (1, 1), ways: Any = ()) -> None:
        self._devices, self._threads, self._ways = devices, threads, ways

    def devices(self, count: int, rollout: int | None, update: int | None) -> Any:
        if isinstance(self._devices, Exception):
            raise self._devices
        if callable(self._devices):
            return self._devices(rollout, update)
        return self._devices

    def threads(self, cores: int, rollout: int, update: int) -> Any:
        return self._threads

    def gives_way(self, role: str) -> Any:
        return self._ways.get(role, ()) if isinstance(self._ways, dict) else self._ways


GOOD = _Own()
IN_TURN = _Own(((0, 1), (1, 0)), ways={"rollout": ["update"], "update": ("rollout",)})
HIDDEN = _Own(lambda rollout, update: ((1,), (1,)) if None in (rollout, update) else ((0,), (1,)))
TOGETHER = _Own(((0, 1), (0, 1)))
RAISES = _Own(ZeroDivisionError("no host"))
TWICE = _Own(((0, 0), (1,)))
BEYOND = _Own(((0,), (2,)))
NUMBERS = _Own((1, 1))
FEW = _Own(((0,), ()))
NO_THREADS = _Own(threads=(0, 1))
NOBODY = _Own(ways=("engines",))
ONE_SIDED = _Own(ways={"rollout": ("update",)})


@pytest.mark.parametrize(
    ("name", "gpus", "words"),
    [
        ("GOOD", 2, ""),
        ("IN_TURN", 2, ""),
        ("TOGETHER", 0, ""),
        ("HIDDEN", 2, "the memory of the same devices at the same time"),
        ("TOGETHER", 2, "the memory of the same devices .* or have the two give way to each other"),
        (
            "RAISES",
            2,
            r"devices\(2, 1, 1\) raises ZeroDivisionError: no host: have it",
        ),
        ("TWICE", 2, r"gives the engines the devices \[0, 0\]: return different numbers from 0"),
        (
            "BEYOND",
            2,
            r"gives the training the devices \[2\]: return different numbers from",
        ),
        ("NUMBERS", 2, r"is \(1, 1\): return two sequences of device numbers"),
        ("FEW", 2, "which has 1 and 0 devices for them; this machine has 2 GPUs: lower a degree"),
        ("NO_THREADS", 2, r"threads\(4, 1, 1\) is \(0, 1\): return two numbers of threads"),
        ("NOBODY", 2, r"gives_way\('rollout'\) is \('engines',\): return a tuple with some of"),
        ("ONE_SIDED", 2, r"gives_way\('update'\) has no rollout: have both make room"),
        ("Where", 2, "without the functions .*: name an object with the functions devices, thr"),
        ("_Own", 2, "is a class, and no object: name an object with the functions devices"),
        ("nowhere", 2, "cannot be imported: AttributeError: .*: check the path"),
    ],
)
def test_what_makes_no_sense_is_refused_before_a_run(name: str, gpus: int, words: str) -> None:
    config = parse_config(with_(stages={"placement": f"tests.cluster.test_placement:{name}"}))
    hardware = Hardware(cpu_cores=4, memory_bytes=2**33)
    if gpus:
        hardware = hardware.model_copy(update={"gpus": gpus, "gpu_memory_bytes": 2**33})
    if not words:
        check_devices(config, hardware)
        return
    with pytest.raises(ConfigError, match=words) as raised:
        check_devices(config, hardware)
    assert "\n" not in str(raised.value)


def test_one_of_ones_own_is_for_fixed_and_not_imported_by_who_only_looks() -> None:
    own = "tests.cluster.test_placement:GOOD"
    stages = {"placement": own}
    with pytest.raises(ConfigError, match=r"of which no other selector\.policy than `fixed`"):
        parse_config(with_(stages=stages, selector={"policy": "live_tokens"}))
    with pytest.raises(ConfigError, match=r"give an import path package\.module:object"):
        parse_config(with_(stages={"placement": "seperate"}))
    config = parse_config(with_(stages=stages))
    assert named_code(config)["stages.placement"] == own
    find_placement.cache_clear()
    with looking(), pytest.raises(ConfigError, match="code that a run file names"):
        check_devices(config, Hardware(cpu_cores=4, memory_bytes=2**33))


def test_the_side_with_the_lower_devices_has_the_first_cores() -> None:
    placement = CheckedPlacement("mine", _Own(((3, 2), (0, 1))))
    site = HostResources(cores=tuple(range(8)), gpus=4, first_gpu=4)
    engines = StageDeployment("rollout", 2)
    assert [placement.place(engines, member, site).gpus for member in (0, 1)] == [(7,), (6,)]
    assert [placement.place(engines, member, site).cores for member in (0, 1)] == [(6,), (7,)]
    mesh = StageDeployment("update", 2, threads=2)
    assert placement.place(mesh, 0, site) == Assignment((0, 1, 2, 3), (4, 5))


def test_engines_on_a_host_of_a_cluster_without_a_learner_are_refused() -> None:
    """Nobody publishes weights there; parts of one machine have their memory together."""
    stages = {"rollout": {"replicas": 2}, "update": {"replicas": 1}}
    hosts = Hardware(cpu_cores=4, memory_bytes=2**33, hosts=2)
    check_devices(parse_config(with_(stages=stages, cluster={"hosts": 2})), hosts)
    cluster = {"backend": "ray", "hosts": 2}
    words = "engines on 2 hosts and ranks of the update on 1: .*: have 2 replicas of the update"
    with pytest.raises(ConfigError, match=words):
        check_devices(parse_config(with_(stages=stages, cluster=cluster)), hosts)
    gpus = hosts.model_copy(update={"gpus": 4, "gpu_memory_bytes": 2**33})
    open_ = {"rollout": {"replicas": 2}}
    apart = parse_config(with_(stages={"rollout": {"replicas": 3}, "placement": "separate"}))
    check_devices(apart, gpus.model_copy(update={"hosts": 1}))
    check_devices(parse_config(with_(stages=open_, cluster=cluster)), gpus)
    stages["update"]["replicas"] = 2
    check_devices(parse_config(with_(stages=stages, cluster=cluster)), hosts)
