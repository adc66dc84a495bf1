"""Another user of this machine, who listens where a server of ours was, and answers what is asked.

A real process as user 65534. It speaks plain HTTP and TLS, with a certificate of its own.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can listen as somebody else")

_SCRIPT = """
import base64, encodings.idna, json, os, pathlib, socket, sys, tempfile, threading
from earl_core.system.identity import new_identity

with tempfile.TemporaryDirectory() as folder:
    identity = new_identity(pathlib.Path(folder) / "impostor.pem")
os.setgroups([])
os.setgid(65534)
os.setuid(65534)

lock = threading.Lock()

def tell(port, what, heard=b""):
    with lock:
        print(json.dumps([port, what, base64.b64encode(heard).decode()]), flush=True)

def answer(path):
    if path.endswith("/health"):
        return True
    if "get_scheduled_flow_runs" in path or path.endswith("filter"):
        return []
    return {"id": "11111111-1111-4111-8111-111111111111", "experiment_id": "1"}

def serve(port, client):
    try:
        client.settimeout(60)
        if client.recv(1, socket.MSG_PEEK) == b"\\x16":
            tell(port, "tls")
            client = identity.wrap_socket(client, server_side=True)
            tell(port, "trusted")
        while heard := client.recv(65536):
            tell(port, "heard", heard)
            body = json.dumps(answer(heard.split(b" ")[1].decode().partition("?")[0])).encode()
            head = "HTTP/1.1 200 OK\\r\\ncontent-type: application/json\\r\\n"
            client.sendall(f"{head}content-length: {len(body)}\\r\\n\\r\\n".encode() + body)
    except (OSError, IndexError, ValueError):
        pass
    finally:
        client.close()

def listen(port):
    with socket.create_server(("127.0.0.1", port)) as listener:
        tell(listener.getsockname()[1], "listens")
        while True:
            client, _ = listener.accept()
            threading.Thread(target=serve, args=(listener.getsockname()[1], client)).start()

for port in sys.argv[1:]:
    threading.Thread(target=listen, args=(int(port),)).start()
"""


class Heard(NamedTuple):
    """What a connection told. what: listens, tls (a handshake began), trusted (and ended well),
    or heard, with bytes that could be read."""

    port: int
    what: str
    text: str


class Impostor:
    """Made by `impostor`; `ports` are those where it listens, `heard` grows."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.ports: list[int] = []
        self.heard: list[Heard] = []

    def whats(self, port: int | None = None) -> set[str]:
        """What happened, at this port or anywhere."""
        return {each.what for each in self.heard if port in (None, each.port)}

    def read(self) -> None:
        """Until it has ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            port, what, data = json.loads(line)
            if what == "listens":
                self.ports.append(port)
            else:
                text = base64.b64decode(data).decode("latin-1")
                self.heard.append(Heard(port, what, text))


@contextmanager
def impostor(*ports: int) -> Iterator[Impostor]:
    """Listens at these ports (0: at any free one) until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, *map(str, ports)],
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    made = Impostor(process)
    reader = threading.Thread(target=made.read)
    reader.start()
    try:
        while len(made.ports) < len(ports):
            assert reader.is_alive(), "a port is taken"
            threading.Event().wait(0.02)
        yield made
    finally:
        process.kill()
        process.wait()
        reader.join()
        assert process.stdout is not None
        process.stdout.close()
