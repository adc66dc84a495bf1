"""How bytes of sealed shards reach other processes and hosts."""

from earl_core.dispatch.remote.transport import (
    Corrupt,
    Gone,
    Proof,
    Refused,
    RemoteRead,
    TimedOut,
    Transport,
    TransportError,
    Unreachable,
)

__all__ = [
    "Corrupt",
    "Gone",
    "Proof",
    "Refused",
    "RemoteRead",
    "TimedOut",
    "Transport",
    "TransportError",
    "Unreachable",
]
