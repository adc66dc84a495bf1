"""The hardware of a run: what all of its hosts have in common."""

from __future__ import annotations

from collections.abc import Sequence

from earl_core.cluster.host import Host, local_hosts
from earl_core.deployment.shapes import Hardware
from earl_core.system.hardware import HostResources


def hardware_of(hosts: Sequence[Host]) -> Hardware:
    """Of each host as much as the one that has least."""
    resources: list[HostResources] = [host.resources for host in hosts]
    gpus = min(each.gpus for each in resources)
    return Hardware(
        cpu_cores=min(len(each.cores) for each in resources),
        memory_bytes=min(each.memory_bytes for each in resources),
        gpus=gpus * len(hosts),
        gpu_memory_bytes=min(each.gpu_memory_bytes for each in resources) if gpus else 0,
        gpu_name=resources[0].gpu_name if gpus else "",
        hosts=len(hosts),
    )


def read_hardware(hosts: int = 1) -> Hardware:
    """Of this machine, in equal parts that work as hosts."""
    return hardware_of(local_hosts(hosts))
