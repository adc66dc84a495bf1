"""One run on disk: directory, lock, sealed stages, checkpoints, metrics, ledger. No torch."""

from earl_core.run.directory import RunDirectory
from earl_core.run.keys import stage_key

__all__ = ["RunDirectory", "stage_key"]
