"""Data Dispatcher: Arrow shards in shared memory, manifests that describe them, reads by range."""

from earl_core.dispatch.batch import Batch
from earl_core.dispatch.manifest import Manifest, ManifestError, ShardEntry, read_manifest
from earl_core.dispatch.store import ShardStore, StoreFull

__all__ = [
    "Batch",
    "Manifest",
    "ManifestError",
    "ShardEntry",
    "ShardStore",
    "StoreFull",
    "read_manifest",
]
