"""Errors of files that hold tensors."""

from __future__ import annotations

from earl_core.system.errors import EarlError


class WeightsError(EarlError):
    """Published weights that are missing, damaged or of another model."""


class CheckpointError(EarlError):
    """A training state that is incomplete, damaged, or of another model."""
