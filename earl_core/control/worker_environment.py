"""The environment variables that processes of worker groups get."""

from __future__ import annotations

import os


def worker_environment(threads: int) -> dict[str, str]:
    """For a rank that computes with this many CPU threads."""
    return {
        "OMP_NUM_THREADS": str(threads),
        # Threads that spin at a barrier for one that lost its core slow a busy machine down
        # tenfold; waiting costs a few microseconds.
        "OMP_WAIT_POLICY": "PASSIVE",
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        "TOKENIZERS_PARALLELISM": "false",
        # Code of environments runs there, and has no business with the Prefect server.
        **dict.fromkeys(
            ("PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_KEY"), ""
        ),
        # vLLM must be gone before the supervisor loses patience, or it leaves entries in shared
        # memory.
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
    }
