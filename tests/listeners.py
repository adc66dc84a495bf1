"""Which sockets processes listen on, as Linux shows them in /proc, and what they want to know."""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from earl_core.system.processes import descendants

_ANYBODY = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
_ANYBODY.check_hostname = False
_ANYBODY.verify_mode = ssl.CERT_NONE

_LISTENING = "0A"
_PAUSE_SECONDS = 0.2
_ENDED = "it ended before it was asked"


class Listener(NamedTuple):
    """A socket that others can reach; `kind` is tcp or udp, `command` its process's."""

    pid: int
    command: str
    kind: str
    address: str
    port: int

    @property
    def on_loopback(self) -> bool:
        """Whether only processes of this machine reach it."""
        return ipaddress.ip_address(self.address).is_loopback


@contextmanager
def watching(pid: int) -> Iterator[dict[Listener, str]]:
    """Collect all that the process's descendants listen on, until the block ends: each listener
    and the first line of its answer to an HTTP request without a password."""
    seen: dict[Listener, str] = {}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_PAUSE_SECONDS):
            for listener in listeners(process.pid for process in descendants(pid)):
                seen.setdefault(listener, "")
                # A server listens some time before it answers.
                if owner(listener) == "other" and not seen[listener].startswith("HTTP/"):
                    answer = ask_http(listener)
                    lives = listener in listeners([listener.pid])
                    seen[listener] = answer if lives or answer.startswith("HTTP/") else _ENDED

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def owner(listener: Listener) -> str:
    """Whose socket it is: torch, for the ranks of a mesh; vllm, for an engine; other."""
    if "VLLM" in listener.command or "vllm" in listener.command:
        return "vllm"
    return "torch" if "earl_core.cluster.rank_process" in listener.command else "other"


def ask_http(listener: Listener) -> str:
    """The first line of the answer to who knows no password, by TLS where it is spoken."""
    if listener.kind != "tcp":
        return ""
    answer = ""
    for wrap in (_ANYBODY.wrap_socket, lambda plain: plain):
        try:
            with (
                socket.create_connection((listener.address, listener.port), timeout=2) as plain,
                wrap(plain) as asking,
            ):
                asking.sendall(b"GET /api/admin/version HTTP/1.0\r\n\r\n")
                answer = asking.recv(4096).split(b"\r\n")[0].decode(errors="replace")
        except OSError as error:
            answer = repr(error)
        if answer.startswith("HTTP/"):
            break
    return answer


def listeners(pids: Iterable[int]) -> list[Listener]:
    """Listening TCP sockets and bound, unconnected UDP sockets of these processes."""
    found = []
    for pid in pids:
        command, own = _command(pid), _inodes(pid)
        if not command:
            # It is ending: its memory is gone, its sockets are still listed, and nobody accepts.
            continue
        for table in ("tcp", "tcp6", "udp", "udp6"):
            for inode, address, port in _bound(pid, table):
                if inode in own:
                    found.append(Listener(pid, command, table[:3], address, port))
    return found


def _inodes(pid: int) -> set[str]:
    found = set()
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    return found


def _bound(pid: int, table: str) -> list[tuple[str, str, int]]:
    rows = []
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            local, peer, state, inode = fields[1], fields[2], fields[3], fields[9]
            unconnected = int(peer.partition(":")[2], 16) == 0
            if (state == _LISTENING) if table.startswith("tcp") else unconnected:
                host, _, port = local.partition(":")
                rows.append((inode, _address(host), int(port, 16)))
    return rows


def _address(text: str) -> str:
    words = bytes.fromhex(text)
    raw = b"".join(struct.pack(">I", word) for (word,) in struct.iter_unpack("=I", words))
    family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, raw)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def check(heard: dict[Listener, str], *owners: str) -> None:
    """No socket is open beyond this machine, and none without a password but those of torch and
    vLLM. owners: some of each were heard of."""
    assert {listener for listener in heard if not listener.on_loopback} == set()
    assert {listener for listener in heard if listener.kind != "tcp"} == set()
    for listener, answer in heard.items():
        # `docs/security.md` names those that want no password.
        no_word = owner(listener) in ("torch", "vllm") or answer == _ENDED
        assert no_word or " 401 " in answer, (listener, answer)
    # Otherwise nothing was looked at.
    assert set(owners) <= {owner(listener) for listener in heard}
