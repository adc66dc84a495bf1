"""One side of `benchmarks.rollout` in a process of its own; its standard input says what to do.

`python -m benchmarks.rollout_side SIDE CONFIG [A.B=C ...]` with SIDE one of
    earl-vllm, earl-torch   the agent loop on EARL's engines; plays games and records its requests
    earl-vllm-adapter       likewise, with pairs of rank 16 beside the model
    raw-separate            vLLM's AsyncLLM, its engine in a process of its own; replays requests
    raw-in-process          vLLM's LLMEngine, stepped in this process; replays requests
Each line of input is a JSON command, each line of output its JSON answer; the first answer says
that the side is ready. Before every measurement the prefix cache is emptied.

Raw vLLM has EARL's threads, KV cache, block size and choice of CUDA graphs, which are the fastest
found on the platform; prefill steps are those of vLLM's `LLM`, longer than `AsyncLLM`'s; everything
else is vLLM's default, and requests carry no seed: nothing slows vLLM down that only EARL needs.
Log-probs of the sampled tokens are asked for, since training cannot do without them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Protocol

from benchmarks.rollout import Recorder, Recording
from earl_core.config import RunConfig, load_config
from earl_core.config.model import AdapterConfig
from earl_core.control.hardware import read_hardware
from earl_core.environments.hosting.pool import EnvironmentPool
from earl_core.pretrained.model_directory import model_directory, read_model_shape
from earl_core.rollout.agent_loop import play
from earl_core.rollout.engine_factory import build_engine, load_chat_tokenizer
from earl_core.rollout.engines import vllm_environment
from earl_core.rollout.episode_player import PlaySettings
from earl_core.selector.choice.policy import select
from earl_core.selector.choice.selection import SelectionInput
from earl_core.trajectory.samples import EpisodeSpec, derive_seed
from earl_core.weights.manifest import WeightsManifest
from tools.harness import stdout_for_results


class Side(Protocol):
    """A program whose rollout is measured."""

    async def start(self) -> None: ...
    async def measure(self, command: dict[str, Any]) -> dict[str, Any]: ...
    async def stop(self) -> None: ...


class Earl:
    """The agent loop exactly as the rollout worker runs it, with a recorder before the engine."""

    def __init__(self, config: RunConfig, scratch: Path) -> None:
        self._config = config
        shape = read_model_shape(model_directory(config.model))
        plan = select(SelectionInput.of(config, read_hardware(), shape))
        deployment = plan["rollout"]._replace(replicas=1)
        self._running = deployment.max_running_requests or config.rollout.max_running_requests
        self._chat = load_chat_tokenizer(config)
        self._engine = build_engine(config, deployment)
        self._weights = _first_version(config, scratch)
        environment = config.environment
        self._pool = EnvironmentPool(environment.name, environment.options, hosts=environment.hosts)

    async def start(self) -> None:
        await self._pool.start()
        await self._engine.start()

    async def measure(self, command: dict[str, Any]) -> dict[str, Any]:
        await self._engine.play_under(self._weights)  # as every iteration does
        rollout, games = self._config.rollout, command["games"]
        recorder = Recorder(self._engine)
        specs = [
            EpisodeSpec(game, game // rollout.group_size, game // rollout.group_size, seed)
            for game in range(games)
            for seed in [derive_seed(self._config.seed, command["repetition"], game)]
        ]
        settings = PlaySettings(
            max_turns=rollout.max_turns,
            max_tokens_per_turn=rollout.max_tokens_per_turn,
            max_tokens_per_episode=rollout.max_tokens_per_episode,
            temperature=rollout.temperature,
            max_live_episodes=self._running if self._engine.lockstep else 2 * self._running,
        )
        started = time.perf_counter()
        await play(recorder, self._pool, self._chat, specs, settings)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "recording": recorder.recording.as_json()}

    async def stop(self) -> None:
        await self._engine.stop()
        await self._pool.stop()


def _first_version(config: RunConfig, scratch: Path) -> WeightsManifest:
    """The model, or the pairs that change nothing of it."""
    from earl_core.weights.adapter_pairs import publish_unchanged
    from earl_core.weights.load import manifest_from_directory

    directory, model = model_directory(config.model), config.model
    if model.adapter is None:
        return manifest_from_directory(directory, 0)
    return publish_unchanged(model.model_copy(update={"path": str(directory)}), scratch, 0)


class _Raw(ABC):
    """vLLM alone, in one of its process arrangements."""

    def __init__(self, config: RunConfig, directory: Path, scratch: Path) -> None:
        self._rollout = config.rollout
        self._directory = directory
        self._scratch = scratch
        self._names = itertools.count()
        self._temperature = config.rollout.temperature
        self._engine: Any = None

    async def measure(self, command: dict[str, Any]) -> dict[str, Any]:
        recording = Recording.from_json(command["recording"])
        await self.empty_cache()
        started = time.perf_counter()
        generated = await self.replay(recording)
        seconds = time.perf_counter() - started
        if generated != recording.generated_tokens:
            raise RuntimeError(
                f"vLLM generated {generated} tokens where {recording.generated_tokens} were asked"
            )
        return {"seconds": seconds}

    @abstractmethod
    async def empty_cache(self) -> None:
        """Forget all prefixes."""

    @abstractmethod
    async def replay(self, recording: Recording) -> int:
        """Play all episodes side by side; the number of sampled tokens."""

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

    def _parameters(self, tokens: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            max_tokens=tokens,
            temperature=self._temperature,
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
        await self._engine.reset_prefix_cache()

    async def replay(self, recording: Recording) -> int:
        return sum(await asyncio.gather(*map(self._episode, recording.episodes)))

    async def _episode(self, turns: list[tuple[list[int], int]]) -> int:
        generated = 0
        for prompt, count in turns:
            answers = self._engine.generate(
                {"prompt_token_ids": prompt},
                self._parameters(count),
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
        self._engine.reset_prefix_cache()

    async def replay(self, recording: Recording) -> int:
        left: dict[str, list[tuple[list[int], int]]] = {}

        def ask(turns: list[tuple[list[int], int]]) -> None:
            (prompt, count), rest = turns[0], turns[1:]
            name = str(next(self._names))
            left[name] = rest
            parameters = self._parameters(count)
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


def side(name: str, config: RunConfig, scratch: Path) -> Side:
    """The side of that name, not started."""
    if name == "earl-vllm":
        return Earl(config, scratch)
    if name == "earl-vllm-adapter":
        model = config.model.model_copy(update={"adapter": AdapterConfig(rank=16)})
        return Earl(config.model_copy(update={"model": model}), scratch)
    if name == "earl-torch":
        rollout = config.rollout.model_copy(update={"engine": "torch"})
        return Earl(config.model_copy(update={"rollout": rollout}), scratch)
    kinds = {"raw-separate": SeparateProcess, "raw-in-process": InProcess}
    return kinds[name](config, model_directory(config.model), scratch)


async def serve(made: Side, answers: int) -> None:
    """Answer commands until the input ends."""
    await made.start()
    try:
        os.write(answers, b'{"ready": true}\n')
        while line := await asyncio.to_thread(sys.stdin.readline):
            answer = json.dumps(await made.measure(json.loads(line))) + "\n"
            view = memoryview(answer.encode())
            while view:
                view = view[os.write(answers, view) :]
    finally:
        await made.stop()


def main() -> None:
    name, file, *overrides = sys.argv[1:]
    with stdout_for_results() as answers, tempfile.TemporaryDirectory(prefix="eb-") as scratch:
        made = side(name, load_config(file, overrides), Path(scratch))
        asyncio.run(serve(made, answers))


if __name__ == "__main__":
    main()
