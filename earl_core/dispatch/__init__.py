"""Data Dispatcher: Arrow shards in recycled shared memory, manifests that describe them, plans of
who reads what, and transports that bring it there."""

from earl_core.dispatch.reads.batch import Batch
from earl_core.dispatch.segments.pool import PoolFull
from earl_core.dispatch.shards.manifest import Manifest, ManifestError, ShardEntry, read_manifest
from earl_core.dispatch.shards.shard import ShardWriter
from earl_core.dispatch.shards.store import ShardStore

__all__ = [
    "Batch",
    "Manifest",
    "ManifestError",
    "PoolFull",
    "ShardEntry",
    "ShardStore",
    "ShardWriter",
    "read_manifest",
]
