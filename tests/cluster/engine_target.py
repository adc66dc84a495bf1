"""A target that holds a real vLLM engine, in processes of its own."""

from __future__ import annotations

from typing import Any

from earl_core.cluster.rank_process import WorkerContext


class EngineTarget:
    """Opens the engine in its first call, so that its loop is the rank's."""

    def __init__(self, context: WorkerContext, deployment: dict[str, Any], model: str) -> None:
        self._model = model
        self._engine: Any = None

    async def generate(self) -> list[int]:
        from vllm import SamplingParams, TokensPrompt
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        if self._engine is None:
            options = AsyncEngineArgs(
                model=self._model,
                skip_tokenizer_init=True,
                max_model_len=256,
                enforce_eager=True,
                dtype="float32",
            )
            self._engine = AsyncLLM.from_engine_args(options)
        prompt = TokensPrompt(prompt_token_ids=[1, 2, 3])
        sampling = SamplingParams(max_tokens=8, detokenize=False, ignore_eos=True)
        async for output in self._engine.generate(prompt, sampling, "request"):
            last = output
        return list(last.outputs[0].token_ids)
