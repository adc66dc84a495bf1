"""The hosts of a run, and what all of them have in common."""

from __future__ import annotations

from collections.abc import Sequence

from earl_core.cluster.host import Cluster, Host, LocalCluster, local_hosts
from earl_core.config import ConfigError, RunConfig
from earl_core.deployment.shapes import Hardware
from earl_core.system.hardware import HostResources


def hardware_of(hosts: Sequence[Host], fewest: int | None = None) -> Hardware:
    """Describe the hosts by the one that has least of each resource. fewest: hosts for which
    `stages` says the replicas; None: these."""
    resources: list[HostResources] = [host.resources for host in hosts]
    gpus = min(each.gpus for each in resources)
    return Hardware(
        cpu_cores=min(len(each.cores) for each in resources),
        memory_bytes=min(each.memory_bytes for each in resources),
        gpus=gpus * len(hosts),
        gpu_memory_bytes=min(each.gpu_memory_bytes for each in resources) if gpus else 0,
        gpu_name=resources[0].gpu_name if gpus else "",
        nvlink_gpus=min(each.nvlink_gpus for each in resources),
        nvlink_bandwidth=min(each.nvlink_bandwidth for each in resources),
        pcie_bandwidth=min(each.pcie_bandwidth for each in resources),
        pcie_peers=all(each.pcie_peers for each in resources),
        hosts=len(hosts),
        fewest_hosts=fewest,
    )


def with_network(hardware: Hardware, hosts: Sequence[Host], fetch_bandwidth: float) -> Hardware:
    """Enter the measured bandwidth of shards between the hosts; 0: it was not measured. Collectives
    are as fast, unless GPUs of several hosts have a network beside TCP: they have what it carries
    by what its drivers say."""
    found, beside = {"fetch_bandwidth": fetch_bandwidth}, 0.0
    if hardware.gpus and len(hosts) > 1:
        beside = min(host.resources.rdma_bandwidth for host in hosts)
    if between := max(beside, fetch_bandwidth):
        found["network_bandwidth"] = between
    return hardware.model_copy(update=found)


def open_cluster(config: RunConfig) -> Cluster:
    """The hosts that the configuration asks for, until it is closed. Raises `ConfigError`."""
    given = config.cluster
    if given.backend == "local":
        return LocalCluster(given.fewest)
    try:
        from earl_core.cluster.ray_cluster import RayCluster
    except ModuleNotFoundError as error:
        raise ConfigError(
            "cluster.backend is `ray`, and Ray is not installed: pip install 'earl-rl[ray]'"
        ) from error
    return RayCluster(
        given.address,
        range(given.fewest, given.most + 1),
        given.cpus_per_host,
        given.gpus_per_host,
        config.dispatch.directory,
        insecure=given.insecure,
        seconds=config.deadlines.start,
    )


def expected_hardware(config: RunConfig) -> Hardware:
    """Predict the run's hardware, as far as this machine can tell: hosts of a cluster have its
    memory and GPUs, and as many cores and GPUs as are reserved."""
    given = config.cluster
    if given.backend == "local":
        return read_hardware(given.most)
    gpus = given.most * given.gpus_per_host
    hosts = {"hosts": given.most, "fewest_hosts": given.fewest}
    reserved = {"cpu_cores": given.cpus_per_host, "gpus": gpus}
    return read_hardware().model_copy(update=hosts | reserved)


def read_hardware(hosts: int = 1) -> Hardware:
    """Describe this machine, in equal parts that work as hosts."""
    return hardware_of(local_hosts(hosts))
