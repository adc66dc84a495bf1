"""Equal bits from equal samples: torch's choice of algorithms in this process."""

from __future__ import annotations

import os

import torch


def choose_algorithms(*, deterministic: bool) -> None:
    """Choose the algorithms of this process, before it multiplies on a GPU: cuBLAS reads the
    variable then."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Nothing here reads memory before it is written.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(deterministic)
