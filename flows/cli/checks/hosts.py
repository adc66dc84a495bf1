"""The hosts of a cluster: what they have, and whether they agree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from earl_core.config import ConfigError, RunConfig
from earl_core.control.hardware import open_cluster
from earl_core.control.host_checks import disagreements
from earl_core.system.finding import Finding, Level, refused

_GIB = 2**30


def check_hosts(config: RunConfig) -> Iterator[Finding]:
    """Reserves the hosts that the run would have, for as long as it looks."""
    try:
        with closing(open_cluster(config)) as cluster:
            hosts = cluster.hosts()
            found = disagreements(config, hosts)
    except (ConfigError, ConnectionError) as error:
        yield refused(error) if isinstance(error, ConfigError) else Finding("blocks", str(error))
        return
    for host in hosts:
        has = host.resources
        text = f"{host.name} at {host.address}: {len(has.cores)} CPU cores, {has.gpus} GPUs, "
        yield Finding("good", f"{text}{has.memory_bytes / _GIB:.0f} GiB of memory")
    for each in found:
        level: Level = "blocks" if each.blocks else "warning"
        yield Finding(level, f"{each.host}: {each.problem}", each.remedy)
