"""Two hosts in one machine: namespaces of network, mounts and processes, each with a raylet.

They see one file system, but for /dev/shm, and the link between them is a pair of virtual devices.
Tests and `benchmarks.hosts` use them.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from benchmarks.harness import REPOSITORY

PORT = 6379
_START_SECONDS = 120.0


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
        """Of the Ray cluster."""
        return f"{_address(0)}:{PORT}"

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
            _run("ip", "-n", name, "addr", "add", f"{_address(number)}/24", "dev", end)
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
        """What has crossed the link, both ways together."""
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
            f"--node-ip-address={_address(number)} --num-cpus={self._cores} "
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
        """Of a process on a host."""
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


def _address(number: int) -> str:
    return f"10.99.0.{number + 1}"


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
