"""Hosts in one machine: namespaces of the kernel, and links of a limited rate between them.

`network` has hosts of a network alone, each with a link to one switch:

    namespace host 0 ── veth ──┐
    namespace host 1 ── veth ──┤ bridge, in a namespace of its own
    ...                        │
    namespace host N-1 ─ veth ─┘

Both directions of every link are shaped by a token bucket. `TwoHosts` have namespaces of mounts and
processes too, and a raylet each: they see one file system, but for /dev/shm, and the link between
them is a pair of virtual devices. Nothing of this machine's own network is touched. All of it
needs root.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tools.harness import REPOSITORY

PREFIX = "earlbench"
_NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
PORT = 6379
_START_SECONDS = 120.0


@dataclass(frozen=True)
class Link:
    """Properties of every host's link.

    burst_bytes: sent at once after a pause; less than two of the kernel's largest packets would
    make the shaper cut them and the CPU the limit. queue_bytes: what waits at a link before
    packets are dropped, as in a port of a switch. congestion_control: None for the system's.
    """

    megabits_per_second: float
    burst_bytes: int = 128 * 1024
    queue_bytes: int = 1024 * 1024
    congestion_control: str | None = None


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
    """Return the reason why namespaces cannot be made here; None when they can."""
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
        _shape_link(switch, f"port{host}", made.link)
        _shape_link(name, "uplink", made.link)
        if made.link.congestion_control:
            setting = f"net.ipv4.tcp_congestion_control={made.link.congestion_control}"
            _run("ip", "netns", "exec", name, "sysctl", "-q", "-w", setting)


def _shape_link(namespace: str, device: str, link: Link) -> None:
    rate = f"{link.megabits_per_second:g}mbit"
    bucket = ("burst", str(link.burst_bytes), "limit", str(link.queue_bytes))
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, *bucket)


def _remove(name: str) -> None:
    for path in list(_NAMESPACES.glob(f"{name}-*")):
        subprocess.run(["ip", "netns", "delete", path.name], capture_output=True, check=False)


class TwoHosts:
    """host-0, where controllers run, and host-1. directory: logs of the raylets."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._tag = f"earl{os.getpid()}"
        self._token = secrets.token_hex(32)
        self._hosts: dict[int, subprocess.Popen[bytes]] = {}
        self._cores = 1

    @property
    def address(self) -> str:
        """Address of the Ray cluster."""
        return f"{_host_address(0)}:{PORT}"

    def link(self) -> None:
        """Make both namespaces of network, and the link. Raises `CalledProcessError`."""
        names = [f"{self._tag}-{number}" for number in (0, 1)]
        for name in names:
            _run("ip", "netns", "add", name)
        ends = [f"{self._tag[-9:]}v{number}" for number in (0, 1)]
        _run(
            *("ip", "link", "add", ends[0], "netns", names[0], "type", "veth"),
            *("peer", "name", ends[1], "netns", names[1]),
        )
        for number, (name, end) in enumerate(zip(names, ends, strict=True)):
            _run("ip", "-n", name, "addr", "add", f"{_host_address(number)}/24", "dev", end)
            for device in ("lo", end):
                _run("ip", "-n", name, "link", "set", device, "up")
        _run("unshare", "--mount", "--pid", "--fork", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm")

    def start(self, hosts: int = 2) -> None:
        """Start both raylets, or host-0's, which then has both cores."""
        self._cores = 1 if hosts == 2 else os.cpu_count() or 1
        self._start_raylet(0, "--head", f"--port={PORT}", "--include-dashboard=false")
        if hosts == 2:
            self.join()

    def join(self) -> None:
        """Start the raylet of host-1."""
        self._start_raylet(1, f"--address={self.address}")

    def shape(self, megabits: float) -> None:
        """Let no more than so many megabits a second through, each way."""
        for number in (0, 1):
            device = f"{self._tag[-9:]}v{number}"
            _run(
                *("tc", "-n", f"{self._tag}-{number}", "qdisc", "replace", "dev", device, "root"),
                *("tbf", "rate", f"{megabits:g}mbit", "burst", "256kb", "limit", "4mb"),
            )

    def link_bytes(self) -> int:
        """Count the bytes that have crossed the link, both ways together."""
        shown = _run("ip", "-n", f"{self._tag}-0", "-s", "-j", "link", "show", "type", "veth")
        (link,) = json.loads(shown)
        return sum(int(link["stats64"][way]["bytes"]) for way in ("rx", "tx"))

    def cut(self) -> None:
        """Take the link away: no packet arrives any more, and nothing says so."""
        self._set_link("down")

    def mend(self) -> None:
        """Undo `cut`."""
        self._set_link("up")

    def _set_link(self, state: str) -> None:
        name = f"{self._tag}-0"
        _run("ip", "-n", name, "link", "set", f"{self._tag[-9:]}v0", state)

    def kill_head(self) -> None:
        """SIGKILL to what keeps the cluster together."""
        for process in psutil.Process(self._hosts[0].pid).children(recursive=True):
            if process.name() == "gcs_server":
                process.kill()

    def kill_daemon(self) -> None:
        """SIGKILL to the actor of a run on host-1; the raylet stays."""
        for process in psutil.Process(self._hosts[1].pid).children(recursive=True):
            if process.name().startswith("ray::_Daemon"):
                process.kill()

    def kill(self) -> None:
        """SIGKILL to all processes of host-1; its shared memory goes with them."""
        self._hosts[1].kill()
        self._hosts[1].wait()

    def _start_raylet(self, number: int, *arguments: str) -> None:
        ray = Path(sys.executable).parent / "ray"
        first = number % (os.cpu_count() or 1)
        own = (
            "mount -t tmpfs -o size=4g tmpfs /dev/shm && exec "
            f"taskset -c {first}-{first + self._cores - 1} {ray} start --block "
            f"--node-ip-address={_host_address(number)} --num-cpus={self._cores} "
            "--object-store-memory=100000000 "
            "--disable-usage-stats " + " ".join(arguments)
        )
        log = self.directory / f"raylet-{number}.log"
        with log.open("wb") as output:
            started = subprocess.Popen(
                [
                    *("ip", "netns", "exec", f"{self._tag}-{number}", "unshare", "--mount"),
                    *("--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", own),
                ],
                env=self.environment(number),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._hosts[number] = started
        deadline = time.monotonic() + _START_SECONDS
        while "Ray runtime started" not in log.read_text():
            assert started.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)

    def environment(self, number: int) -> dict[str, str]:
        """Return the environment of a process on a host."""
        return {
            **os.environ,
            "EARL_HOST": f"host-{number}",
            "PYTHONPATH": str(REPOSITORY),
            "HF_HUB_OFFLINE": "1",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
        }

    def popen(self, number: int, *command: str, directory: Path) -> subprocess.Popen[str]:
        """Start a command on a host."""
        (inside,) = psutil.Process(self._hosts[number].pid).children()
        return subprocess.Popen(
            [
                "nsenter",
                "-t",
                str(inside.pid),
                "-m",
                "-n",
                "-p",
                "--wd=" + str(directory),
                *command,
            ],
            env=self.environment(number),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, number: int, *command: str, directory: Path, seconds: float = 300.0) -> str:
        """Run a command on a host; what it printed. It must succeed."""
        process = self.popen(number, *command, directory=directory)
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(process.communicate()[0]) from None
        assert process.returncode == 0, output
        return output

    def shared_memory(self, number: int) -> list[str]:
        """Files of EARL in a host's shared memory."""
        found = self.run(
            number, "find", "/dev/shm", "-path", "*earl-*", "-type", "f", directory=self.directory
        )
        return found.split()

    def ranks(self, number: int, seconds: float = 20.0) -> list[str]:
        """Command lines of EARL's processes on a host that do not end within this time."""
        deadline = time.monotonic() + seconds
        while True:
            found = self.run(number, "ps", "-eo", "args", directory=self.directory).splitlines()
            ours = [line for line in found if line.startswith("earl_core.")]
            if not ours or time.monotonic() > deadline:
                return ours
            time.sleep(0.2)

    def stop(self) -> None:
        """End all that runs on the hosts."""
        for host in self._hosts.values():
            host.kill()
            host.wait()
        for number in (0, 1):
            gone = ["ip", "netns", "del", f"{self._tag}-{number}"]
            subprocess.run(gone, check=False, stderr=subprocess.DEVNULL)


def _host_address(number: int) -> str:
    return f"10.99.0.{number + 1}"


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
