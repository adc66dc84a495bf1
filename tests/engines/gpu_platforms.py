"""What vLLM makes of our arguments on GPUs that are not there: `python -m` this, with a directory.

A platform of its CUDA class, whose questions to the driver are answered here, stands where vLLM
looks for the platform, before anything of it is imported. Prints a JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from earl_core.config.rollout import VllmConfig
from earl_core.rollout.engines import vllm_environment
from earl_core.rollout.engines.base_engine import EngineSettings

GPUS = {
    "L4": ("NVIDIA L4", 24, (8, 9)),
    "A100": ("NVIDIA A100-SXM4-80GB", 80, (8, 0)),
    "H100": ("NVIDIA H100 80GB HBM3", 80, (9, 0)),
    "H200": ("NVIDIA H200", 141, (9, 0)),
}
"""Name as the driver gives it, GiB, compute capability."""


def put_in_place() -> Any:
    """The stand-in, whose `gpu` can be set to a key of `GPUS`."""
    # The CPU build has no kernels for CUDA, and its CUDA platform only wants them to be there.
    sys.modules["vllm._C_stable_libtorch"] = ModuleType("vllm._C_stable_libtorch")
    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class Gpu(CudaPlatformBase):
        gpu = "L4"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(*GPUS[cls.gpu][2])

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return GPUS[cls.gpu][0]

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return GPUS[cls.gpu][1] << 30

        @classmethod
        def is_fully_connected(cls, physical_device_ids: list[int]) -> bool:
            return True

        @classmethod
        def device_count(cls) -> int:
            return 8

        def is_cumem_allocator_available(self) -> bool:
            return True

        @classmethod
        def log_warnings(cls) -> None:
            pass

    vllm.platforms._current_platform = Gpu()
    return Gpu


def resolved(directory: Path, engine: EngineSettings, settings: VllmConfig) -> dict[str, Any]:
    """vLLM's own configuration for our arguments, as far as the platform decides it."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    arguments = vllm_environment.engine_arguments(directory, engine, settings, 256, 1)
    made = AsyncEngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS)
    compiled = made.compilation_config
    return {
        "arguments": {name: value for name, value in arguments.items() if name != "hf_overrides"},
        "eager": made.model_config.enforce_eager,
        "graphs": compiled.cudagraph_mode.name,
        "compiled": compiled.mode.name,
        "captured": max(compiled.cudagraph_capture_sizes or [0]),
        "prefill": made.scheduler_config.max_num_batched_tokens,
        "running": made.scheduler_config.max_num_seqs,
        "sleeps": made.model_config.enable_sleep_mode,
        "block_size": made.cache_config.block_size,
    }


_INSPECT = (
    "from vllm.model_executor.models.registry import ModelRegistry\n"
    "ModelRegistry.models['LlamaForCausalLM'].inspect_model_cls()"
)
"""Keeps in vLLM's cache what vLLM asks a process of its own for, in which no stand-in is."""


def main() -> None:
    directory = Path(sys.argv[1])
    subprocess.run([sys.executable, "-c", _INSPECT], check=True, stdout=sys.stderr)
    platform = put_in_place()
    vllm_environment.prepare(directory, 1, 0)
    vllm_environment.load()
    from vllm.utils.system_utils import get_mp_context

    engine = EngineSettings(dtype="bfloat16", max_running_requests=256)
    found: dict[str, Any] = {"start_method": get_mp_context().get_start_method()}
    for platform.gpu in GPUS:
        found[platform.gpu] = resolved(directory, engine, VllmConfig())
    found["many"] = resolved(directory, replace(engine, max_running_requests=1000), VllmConfig())
    asked = VllmConfig(enforce_eager=True, block_size=64)
    found["asked"] = resolved(directory, engine, asked)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
