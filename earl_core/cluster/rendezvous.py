"""How the ranks of a local group find each other, at a port that no other process can take.

The controller binds a socket to loopback before it starts the ranks, and rank 0 inherits it. Left
to itself torch.distributed listens on every interface, at a port that was free some time before;
its store knows no password.
"""

from __future__ import annotations

import os
import socket

LISTENER = "EARL_RENDEZVOUS_FD"
"""Environment variable of rank 0: the number of the bound socket that it inherited."""


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
