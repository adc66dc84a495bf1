"""vLLM without EARL: replays recorded requests in either of vLLM's process arrangements.

Threads, KV cache, block size, and whether there are CUDA graphs are EARL's, which are the fastest
found on the platform; prefill steps are those of vLLM's `LLM`, longer than `AsyncLLM`'s; everything
else is vLLM's default, and requests carry no seed: nothing slows vLLM down that only EARL needs.
Log-probs of the sampled tokens are asked for, since training cannot do without them.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from pathlib import Path
from typing import Any

from benchmarks.rollout_requests import Recording
from earl_core.config import RunConfig
from earl_core.rollout.engines import vllm_environment


class _Raw:
    def __init__(self, config: RunConfig, directory: Path, scratch: Path) -> None:
        self._rollout = config.rollout
        self._directory = directory
        self._scratch = scratch
        self._names = itertools.count()
        self._engine: Any = None

    def _arguments(self) -> dict[str, Any]:
        """Arguments of vLLM's `EngineArgs`; sets the environment that its processes read."""
        vllm_environment.prepare(self._scratch, 1, self._rollout.threads)
        vllm_environment.load()
        running = self._rollout.max_running_requests
        return {
            "model": str(self._directory),
            "dtype": self._rollout.dtype,
            "max_model_len": self._rollout.max_model_len,
            "max_num_seqs": running,
            "enable_prefix_caching": True,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "disable_log_stats": True,
            **vllm_environment.platform_arguments(self._rollout.vllm, running),
        }

    def _parameters(self, tokens: int, temperature: float) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            max_tokens=tokens,
            temperature=temperature,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


class SeparateProcess(_Raw):
    """`AsyncLLM`: the engine in a process of its own, a coroutine for each episode."""

    async def start(self) -> None:
        """Start vLLM's processes."""
        arguments = self._arguments()
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        self._engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS
        )

    async def empty_cache(self) -> None:
        """Forget all prefixes."""
        await self._engine.reset_prefix_cache()

    async def replay(self, recording: Recording, temperature: float) -> int:
        """Play all episodes side by side; the number of sampled tokens."""
        counts = await asyncio.gather(
            *(self._episode(turns, temperature) for turns in recording.episodes)
        )
        return sum(counts)

    async def _episode(self, turns: list[tuple[list[int], int]], temperature: float) -> int:
        generated = 0
        for prompt, count in turns:
            answers = self._engine.generate(
                {"prompt_token_ids": prompt},
                self._parameters(count, temperature),
                request_id=str(next(self._names)),
            )
            async for answer in answers:
                generated += len(answer.outputs[0].token_ids)
        return generated

    async def stop(self) -> None:
        """End vLLM's processes."""
        engine, self._engine = self._engine, None
        if engine is not None:
            if engine.output_handler is not None:
                # It would report the end of the process as a failure.
                engine.output_handler.cancel()
                await asyncio.gather(engine.output_handler, return_exceptions=True)
            await asyncio.to_thread(engine.shutdown, 20.0)


class InProcess(_Raw):
    """`LLMEngine` stepped in this process; an answer puts its episode's next request in."""

    async def start(self) -> None:
        """Load the model."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        arguments = self._arguments()
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        self._engine = LLMEngine.from_engine_args(
            EngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS
        )

    async def empty_cache(self) -> None:
        """Forget all prefixes."""
        self._engine.reset_prefix_cache()

    async def replay(self, recording: Recording, temperature: float) -> int:
        """Play all episodes side by side; the number of sampled tokens."""
        left: dict[str, list[tuple[list[int], int]]] = {}

        def ask(turns: list[tuple[list[int], int]]) -> None:
            (prompt, count), rest = turns[0], turns[1:]
            name = str(next(self._names))
            left[name] = rest
            parameters = self._parameters(count, temperature)
            self._engine.add_request(name, {"prompt_token_ids": prompt}, parameters)

        for turns in recording.episodes:
            ask(turns)
        generated = 0
        while self._engine.has_unfinished_requests():
            for answer in self._engine.step():
                if answer.finished:
                    generated += len(answer.outputs[0].token_ids)
                    if rest := left.pop(answer.request_id):
                        ask(rest)
        return generated

    async def stop(self) -> None:
        """Free the engine and end the workers it has."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.engine_core.shutdown()
