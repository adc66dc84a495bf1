"""One side of `benchmarks.rollout` in a process of its own; its standard input says what to do.

`python -m benchmarks.rollout_side SIDE CONFIG [A.B=C ...]` with SIDE one of
    earl-vllm, earl-torch   the agent loop on EARL's engines; plays games and records its requests
    raw-separate            vLLM's AsyncLLM, its engine in a process of its own; replays requests
    raw-in-process          vLLM's LLMEngine, stepped in this process; replays requests
Each line of input is a JSON command, each line of output its JSON answer; the first answer says
that the side is ready. Before every measurement the prefix cache is emptied.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

from benchmarks.harness import stdout_for_results
from benchmarks.rollout_raw import InProcess, SeparateProcess
from benchmarks.rollout_requests import Recorder, Recording
from earl_core.config import RunConfig, load_config
from earl_core.control.hardware import read_hardware
from earl_core.environments.pool import EnvironmentPool
from earl_core.pretrained.model_directory import model_directory, read_model_shape
from earl_core.rollout.agent_loop import play
from earl_core.rollout.engine_factory import build_engine, load_chat_tokenizer
from earl_core.rollout.episode_player import PlaySettings
from earl_core.selector.choice.policy import select
from earl_core.selector.choice.selection import SelectionInput
from earl_core.trajectory.samples import EpisodeSpec, derive_seed


class Side(Protocol):
    """What is measured."""

    async def start(self) -> None: ...
    async def measure(self, command: dict[str, Any]) -> dict[str, Any]: ...
    async def stop(self) -> None: ...


class Earl:
    """The agent loop exactly as the rollout worker runs it, with a recorder before the engine."""

    def __init__(self, config: RunConfig) -> None:
        from earl_core.weights.load import manifest_from_directory

        self._config = config
        shape = read_model_shape(model_directory(config.model))
        plan = select(SelectionInput.of(config, read_hardware(), shape))
        deployment = plan["rollout"]._replace(replicas=1)
        self._running = deployment.max_running_requests or config.rollout.max_running_requests
        self._chat = load_chat_tokenizer(config)
        self._engine = build_engine(config, deployment)
        self._weights = manifest_from_directory(model_directory(config.model), 0)
        environment = config.environment
        self._pool = EnvironmentPool(environment.name, environment.options, hosts=environment.hosts)

    async def start(self) -> None:
        await self._pool.start()
        await self._engine.start()

    async def measure(self, command: dict[str, Any]) -> dict[str, Any]:
        await self._engine.load_weights(self._weights)  # as every iteration does
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


class Raw:
    """vLLM alone, in one of its process arrangements."""

    def __init__(self, config: RunConfig, engine: SeparateProcess | InProcess) -> None:
        self._engine = engine
        self._temperature = config.rollout.temperature

    async def start(self) -> None:
        await self._engine.start()

    async def measure(self, command: dict[str, Any]) -> dict[str, Any]:
        recording = Recording.from_json(command["recording"])
        await self._engine.empty_cache()
        started = time.perf_counter()
        generated = await self._engine.replay(recording, self._temperature)
        seconds = time.perf_counter() - started
        if generated != recording.generated_tokens:
            raise RuntimeError(
                f"vLLM generated {generated} tokens where {recording.generated_tokens} were asked"
            )
        return {"seconds": seconds}

    async def stop(self) -> None:
        await self._engine.stop()


def side(name: str, config: RunConfig, scratch: Path) -> Side:
    """The side of that name, not started."""
    if name == "earl-vllm":
        return Earl(config)
    if name == "earl-torch":
        rollout = config.rollout.model_copy(update={"engine": "torch"})
        return Earl(config.model_copy(update={"rollout": rollout}))
    kinds: dict[str, type[SeparateProcess | InProcess]] = {
        "raw-separate": SeparateProcess,
        "raw-in-process": InProcess,
    }
    return Raw(config, kinds[name](config, model_directory(config.model), scratch))


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
