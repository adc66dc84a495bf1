"""What this process may use: limits of control groups of both versions, and visible GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from earl_core.system.control_groups import processor_limit
from earl_core.system.hardware import rdma_bandwidth
from earl_core.system.memory import memory_in_use, memory_limit
from tests.cgroup import memory_cgroup, processor_cgroup

PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
MIB = 2**20


def machine(root: Path, cgroup: str, mountinfo: str, files: dict[str, str]) -> Path:
    """A root directory with these files of `proc` and `sys`."""
    files = {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mountinfo, **files}
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def second_version(root: Path, top: str = "/") -> Path:
    """A process two groups deep; the outer one has the smaller limit."""
    stat = f"anon {50 * MIB}\nactive_file {5 * MIB}\ninactive_file {7 * MIB}\nshmem {9 * MIB}\n"
    return machine(
        root,
        "0::/jobs/own\n" if top == "/" else f"0::{top}/jobs/own\n",
        f"30 23 0:27 {top} /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n",
        {
            "sys/fs/cgroup/memory.stat": "",
            "sys/fs/cgroup/jobs/memory.max": f"{200 * MIB}\n",
            "sys/fs/cgroup/jobs/memory.current": f"{100 * MIB}\n",
            "sys/fs/cgroup/jobs/memory.stat": stat,
            "sys/fs/cgroup/jobs/own/memory.max": "max\n",
            "sys/fs/cgroup/jobs/own/memory.current": f"{10 * MIB}\n",
            "sys/fs/cgroup/jobs/own/memory.stat": stat,
        },
    )


@pytest.mark.parametrize("top", ["/", "/docker/abc"])
def test_the_least_limit_of_all_ancestors_counts_in_version_2(tmp_path: Path, top: str) -> None:
    root = second_version(tmp_path, top)
    assert memory_limit(root) == 200 * MIB
    # Files may be dropped, shared memory may not.
    assert memory_in_use(root) == 88 * MIB


def test_the_least_limit_of_all_ancestors_counts_in_version_1(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory"
    root = machine(
        tmp_path,
        "5:cpu:/\n4:memory:/a/b\n0::/\n",
        "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "34 31 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
        {
            f"{group}/memory.limit_in_bytes": "9223372036854771712\n",
            f"{group}/a/memory.limit_in_bytes": f"{300 * MIB}\n",
            f"{group}/a/memory.usage_in_bytes": f"{250 * MIB}\n",
            f"{group}/a/memory.stat": f"inactive_file 1\ntotal_inactive_file {20 * MIB}\n",
            f"{group}/a/b/memory.limit_in_bytes": f"{400 * MIB}\n",
            f"{group}/a/b/memory.usage_in_bytes": f"{10 * MIB}\n",
        },
    )
    assert memory_limit(root) == 300 * MIB
    assert memory_in_use(root) == 230 * MIB


def test_without_a_limit_it_is_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = machine(tmp_path, "0::/gone\n", "", {})
    assert memory_limit(empty) == PHYSICAL
    memory = psutil.virtual_memory()
    # Another reading would be another number.
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert memory_in_use(empty) == memory.total - memory.available
    # The group is not below its mount, and the path leads out of it: the mount is what there is.
    line = "30 23 0:27 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    limited = {"sys/fs/cgroup/memory.max": f"{64 * MIB}\n"}
    assert memory_limit(machine(tmp_path, "0::/gone\n", line, limited)) == 64 * MIB
    assert memory_limit(machine(tmp_path, "0::/../..\n", line, limited)) == 64 * MIB


@pytest.mark.parametrize(
    ("own", "outer", "limit"),
    [
        ("max 100000", "max 100000", None),
        ("200000 100000", "max 100000", 2.0),
        ("max 100000", "150000 100000", 1.5),
        ("400000 100000", "50000 100000", 0.5),
        ("10000 20000", "-1 100000", 0.5),
        ("", "0 100000", None),
    ],
)
def test_the_least_share_of_the_cores_counts(
    tmp_path: Path, own: str, outer: str, limit: float | None
) -> None:
    line = "30 23 0:27 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    files = {"sys/fs/cgroup/jobs/own/cpu.max": own, "sys/fs/cgroup/jobs/cpu.max": outer}
    assert processor_limit(machine(tmp_path / "2", "0::/jobs/own\n", line, files)) == limit
    group = "sys/fs/cgroup/cpu,cpuacct/jobs"
    files = {}
    for place, text in ((f"{group}/own", own), (group, outer)):
        quota, _, period = text.replace("max", "-1").partition(" ")
        files |= {f"{place}/cpu.cfs_quota_us": quota, f"{place}/cpu.cfs_period_us": period}
    line = "34 31 0:31 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    root = machine(tmp_path / "1", "3:cpu,cpuacct:/jobs/own\n4:memory:/\n", line, files)
    assert processor_limit(root) == limit
    assert processor_limit(tmp_path / "nowhere") is None


def test_ports_beside_tcp_carry_what_their_drivers_say(tmp_path: Path) -> None:
    ports = {
        "mlx5_0/ports/1": ("4: ACTIVE", "400 Gb/sec (4X NDR)"),
        "mlx5_1/ports/1": ("4: ACTIVE", "400 Gb/sec (4X NDR)"),
        "mlx5_1/ports/2": ("1: DOWN", "40 Gb/sec (4X QDR)"),
        "rxe0/ports/1": ("4: ACTIVE", "2.5 Gb/sec (1X SDR)"),
        "odd/ports/1": ("4: ACTIVE", ""),
        "odd/ports/2": ("4: ACTIVE", "inf Gb/sec"),
    }
    assert rdma_bandwidth(tmp_path) == 0
    names = "state", "rate"
    files = {
        f"sys/class/infiniband/{place}/{name}": f"{text}\n"
        for place, texts in ports.items()
        for name, text in zip(names, texts, strict=True)
    }
    assert rdma_bandwidth(machine(tmp_path, "", "", files)) == pytest.approx(802.5e9 / 8)


_INSIDE = """
import os, sys
for group in sys.argv[1:]:
    open(group + "/cgroup.procs", "w").write(str(os.getpid()))
from earl_core.control.hardware import read_hardware
from earl_core.system.memory import memory_in_use
before = memory_in_use()
held = bytearray(os.urandom(1)) * (64 << 20)
print(read_hardware().memory_bytes, memory_in_use() - before, read_hardware().cpu_cores)
"""


def test_a_real_group_limits_what_is_read() -> None:
    with memory_cgroup(1024 * MIB) as memory_group, processor_cgroup(0.6) as processor_group:
        done = subprocess.run(
            [sys.executable, "-c", _INSIDE, str(memory_group), str(processor_group)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    memory, grown, cores = map(int, done.stdout.split())
    # A container that may use 0.6 cores of many has threads for one.
    assert (memory, cores) == (1024 * MIB, 1)
    assert 60 * MIB < grown < 90 * MIB
