"""One run on disk: directory, lock, sealed stages, checkpoints, metrics, ledger. No torch."""

from earl_core.config.stage_keys import stage_key
from earl_core.run.directory import RunDirectory

__all__ = ["RunDirectory", "stage_key"]
