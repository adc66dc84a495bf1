"""A real engine's processes and shared memory go with their group, however it ends."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from earl_core.cluster.errors import WorkerLost
from earl_core.system.processes import descendants
from tests.cluster.conftest import HERE, MakeGroup, gone_within

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
    "HF_HUB_OFFLINE": "1",
}


def shared_memory_of(pids: list[int]) -> set[Path]:
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    return {Path(name) for name in re.findall(r"(/dev/shm/\S+)", maps)}


@HERE
@pytest.mark.slow
@pytest.mark.parametrize(
    "victim",
    ["rank", *(pytest.param(each, marks=pytest.mark.campaign) for each in ("supervisor", "stop"))],
)
def test_an_engine_leaves_no_process_and_no_shared_memory(
    victim: str, make_group: MakeGroup, site: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    group = make_group(
        target="tests.cluster.engine_target:EngineTarget",
        # An engine that this process had may have left the name of a folder that is gone.
        environment={**ENVIRONMENT, "VLLM_RPC_BASE_PATH": tempfile.gettempdir()},
    )
    group.start({}, {"model": str(tmp_path / "model")})
    deadline = {**site, "deadline_seconds": 240}
    assert len(group.call("generate", **deadline)[0]) == 8
    supervisor = group._monitor.ranks[0].process.supervisor.pid
    pids = [process.pid for process in descendants(supervisor)]
    assert len(pids) >= 2
    shared = {path for path in shared_memory_of(pids) if path.exists()}
    assert shared
    if victim == "stop":
        group.stop(grace_seconds=1)
    else:
        os.kill(supervisor if victim == "supervisor" else group.pids[0], signal.SIGKILL)
        time.sleep(0.5)
        with pytest.raises(WorkerLost):
            group.call("generate", **deadline)
    assert gone_within(pids, 60)
    assert not [path for path in shared if path.exists()]
