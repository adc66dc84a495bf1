"""Hosts as network namespaces: each with a link of limited rate to one switch.

    namespace host 0 ── veth ──┐
    namespace host 1 ── veth ──┤ bridge, in a namespace of its own
    ...                        │
    namespace host N-1 ─ veth ─┘

Both directions of every link are shaped by a token bucket. Nothing of this machine's own network
is touched. Needs root.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PREFIX = "earlbench"
_NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Link:
    """What every host's link can do.

    burst_bytes: sent at once after a pause; less than two of the kernel's largest packets would
    make the shaper cut them and the CPU the limit. queue_bytes: what waits at a link before
    packets are dropped, as in a port of a switch. congestion_control: None for the system's.
    """

    megabits_per_second: float
    burst_bytes: int = 128 * 1024
    queue_bytes: int = 1024 * 1024
    congestion_control: str | None = None

    @property
    def bytes_per_second(self) -> float:
        """The rate in bytes."""
        return self.megabits_per_second * 1e6 / 8


@dataclass(frozen=True)
class Network:
    """A network that exists: the address of each host, and how to enter one."""

    name: str
    hosts: int
    link: Link

    def address(self, host: int) -> str:
        """The IPv4 address of a host."""
        return f"10.213.0.{host + 1}"

    def enter(self, host: int) -> None:
        """Move this process (and the children it makes) into a host's namespace."""
        descriptor = os.open(_NAMESPACES / f"{self.name}-{host}", os.O_RDONLY)
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(descriptor, _CLONE_NEWNET) != 0:
                number = ctypes.get_errno()
                raise OSError(number, f"host {host} cannot be entered: {os.strerror(number)}")
        finally:
            os.close(descriptor)

    def dropped(self) -> int:
        """Packets that full queues have dropped so far, over all links."""
        names = [f"{self.name}-switch", *(f"{self.name}-{host}" for host in range(self.hosts))]
        total = 0
        for name in names:
            shown = _run("tc", "-n", name, "-s", "qdisc", "show")
            for line in shown.splitlines():
                if "dropped" in line:
                    total += int(line.partition("dropped")[2].split(",")[0])
        return total


def missing() -> str | None:
    """Why namespaces cannot be made here; None when they can."""
    if os.geteuid() != 0:
        return "namespaces and their links need root: run it with sudo"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"the command {tool!r} is missing: install iproute2"
    try:
        _run("ip", "netns", "add", f"{PREFIX}-{os.getpid()}-probe")
        _run("ip", "netns", "delete", f"{PREFIX}-{os.getpid()}-probe")
    except subprocess.CalledProcessError as error:
        return f"this system lets root make no network namespaces: {error.stderr.strip()}"
    return None


@contextmanager
def network(hosts: int, link: Link) -> Iterator[Network]:
    """Make a network of `hosts` hosts, and remove it at the end."""
    remove_left_over()
    made = Network(f"{PREFIX}-{os.getpid()}", hosts, link)
    try:
        _build(made)
        yield made
    finally:
        _remove(made.name)


def remove_left_over() -> None:
    """Remove networks of benchmarks that were killed."""
    for path in _NAMESPACES.glob(f"{PREFIX}-*") if _NAMESPACES.is_dir() else ():
        owner = path.name.split("-")[1]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            _remove("-".join(path.name.split("-")[:2]))


def _build(made: Network) -> None:
    switch = f"{made.name}-switch"
    _run("ip", "netns", "add", switch)
    _run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
    _run("ip", "-n", switch, "link", "set", "switch", "up")
    for host in range(made.hosts):
        name = f"{made.name}-{host}"
        _run("ip", "netns", "add", name)
        ends = ("type", "veth", "peer", "name", "uplink", "netns", name)
        _run("ip", "-n", switch, "link", "add", f"port{host}", *ends)
        _run("ip", "-n", switch, "link", "set", f"port{host}", "master", "switch", "up")
        _run("ip", "-n", name, "address", "add", f"{made.address(host)}/16", "dev", "uplink")
        _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", name, "link", "set", "uplink", "up")
        _shape(switch, f"port{host}", made.link)
        _shape(name, "uplink", made.link)
        if made.link.congestion_control:
            setting = f"net.ipv4.tcp_congestion_control={made.link.congestion_control}"
            _run("ip", "netns", "exec", name, "sysctl", "-q", "-w", setting)


def _shape(namespace: str, device: str, link: Link) -> None:
    rate = f"{link.megabits_per_second:g}mbit"
    bucket = ("burst", str(link.burst_bytes), "limit", str(link.queue_bytes))
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, *bucket)


def _remove(name: str) -> None:
    for path in list(_NAMESPACES.glob(f"{name}-*")):
        subprocess.run(["ip", "netns", "delete", path.name], capture_output=True, check=False)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout
