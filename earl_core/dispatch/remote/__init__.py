"""How bytes of sealed shards reach other processes and hosts."""

from earl_core.dispatch.remote.transport import Proof, Range, RemoteRead, TransportError

__all__ = ["Proof", "Range", "RemoteRead", "TransportError"]
