"""The environment variables of a rank, beside those of the controller."""

from __future__ import annotations

import os

from earl_core.cluster.fork_server import NATIVE_RUNTIMES
from earl_core.deployment.shapes import Hardware
from earl_core.deployment.stages import TRAINING
from earl_core.system.import_path import installed

_ROUNDS_AS_TOLD = "2.13."
"""Torch that knows the setting; those before end at a word that they do not know."""


def worker_environment(role: str, threads: int, hardware: Hardware) -> dict[str, str]:
    """Return the environment variables of a rank that computes with this many CPU threads."""
    allocator = {}
    told = any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    if hardware.gpus and role in TRAINING and not told:
        # Contexts grow, and no block of the last iteration fits the next one's; vLLM's memory that
        # sleeps cannot be had so.
        settings = "expandable_segments:True"
        if (installed("torch") or "").startswith(_ROUNDS_AS_TOLD):
            # Page-locked memory is a power of two else: an offloaded optimizer takes up to twice
            # its size of the host.
            settings += ",pinned_max_round_threshold_mb:64"
        allocator = {"PYTORCH_ALLOC_CONF": settings}
    return allocator | {
        "OMP_NUM_THREADS": str(threads),
        **NATIVE_RUNTIMES,
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        "TOKENIZERS_PARALLELISM": "false",
        # Code of environments runs there, and has no business with the servers.
        **dict.fromkeys(
            (
                "PREFECT_API_AUTH_STRING",
                "PREFECT_SERVER_API_AUTH_STRING",
                "PREFECT_API_KEY",
                "MLFLOW_TRACKING_PASSWORD",
                "MLFLOW_TRACKING_TOKEN",
            ),
            "",
        ),
        # vLLM must be gone before the supervisor loses patience, or it leaves entries in shared
        # memory.
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
    }
