"""How the ranks of a group find each other, at a port that no other process can take.

Rank 0's host binds a socket to its address before it starts the rank, which inherits it. Left
to itself torch.distributed listens on every interface, at a port that was free some time before;
its store knows no password.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import psutil

LISTENER = "EARL_RENDEZVOUS_FD"
"""Environment variable of rank 0: the number of the bound socket that it inherited."""


LOOPBACK = "127.0.0.1"


def bind_listener(address: str = LOOPBACK) -> socket.socket:
    """A socket bound to a free port; nobody can connect until rank 0 listens."""
    listener = socket.socket()
    listener.bind((address, 0))
    return listener


def meeting_variables(address: str, port: int, own: str = LOOPBACK) -> dict[str, str]:
    """Where all ranks of one start meet. own: the address of the rank's host."""
    # Connections of gloo and NCCL ask for no password, and the host's own name may resolve to an
    # address that nothing can be reached at.
    interface = _interface_of(own)
    return {
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def rank_variables(rank: int, hosts: Sequence[str]) -> dict[str, str]:
    """A rank's number in its group and on its host. hosts: of each rank."""
    own = [number for number, host in enumerate(hosts) if host == hosts[rank]]
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(hosts)),
        "LOCAL_RANK": str(own.index(rank)),
        "LOCAL_WORLD_SIZE": str(len(own)),
    }


def _interface_of(address: str) -> str:
    """The network interface that has an address; Linux calls loopback `lo`."""
    if address != LOOPBACK:
        for name, held in psutil.net_if_addrs().items():
            if any(each.address == address for each in held):
                return name
    return "lo"


def take_listener() -> int:
    """The descriptor of the socket that rank 0 listens with: inherited, else bound to the
    address and port of the environment. Whoever gets it closes it. Raises `OSError`."""
    # It is used once: a process that this rank starts has another descriptor of that number.
    inherited = os.environ.pop(LISTENER, None)
    if inherited is not None:
        return int(inherited)
    with socket.socket() as made:
        made.bind((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        return made.detach()
