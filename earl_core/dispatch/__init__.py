"""Data Dispatcher: Arrow shards in recycled shared memory, manifests that describe them, plans of
who reads what, and transports that bring it there."""

from earl_core.dispatch.batch import Batch, Located
from earl_core.dispatch.manifest import (
    Manifest,
    ManifestError,
    ShardCorrupt,
    ShardEntry,
    read_manifest,
)
from earl_core.dispatch.pool import PoolFull
from earl_core.dispatch.shard import ShardWriter
from earl_core.dispatch.store import ShardStore

__all__ = [
    "Batch",
    "Located",
    "Manifest",
    "ManifestError",
    "PoolFull",
    "ShardCorrupt",
    "ShardEntry",
    "ShardStore",
    "ShardWriter",
    "read_manifest",
]
