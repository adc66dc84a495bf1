"""Errors of files that hold tensors."""

from __future__ import annotations


class WeightsError(ValueError):
    """Published weights that are missing, damaged or of another model."""


class CheckpointError(RuntimeError):
    """A training state that is incomplete, damaged, or of another model."""
