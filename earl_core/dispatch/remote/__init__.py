"""Transports that bring the bytes of sealed shards to other processes and hosts."""

from earl_core.dispatch.remote.transport import Range, RemoteRead, TransportError
from earl_core.dispatch.shards.shard import Proof

__all__ = ["Proof", "Range", "RemoteRead", "TransportError"]
