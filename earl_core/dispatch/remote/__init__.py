"""How bytes of sealed shards reach other processes and hosts."""

from earl_core.dispatch.remote.transport import (
    Corrupt,
    Gone,
    Proof,
    Range,
    Refused,
    RemoteRead,
    TimedOut,
    TransportError,
    Unreachable,
)

__all__ = [
    "Corrupt",
    "Gone",
    "Proof",
    "Range",
    "Refused",
    "RemoteRead",
    "TimedOut",
    "TransportError",
    "Unreachable",
]
