"""Agents behind the gateway beside the built-in loop: the same conversations, on one engine.

Sessions run in a process of their own, an environment host, in both. The two sides take turns in
one process with one engine; ratios are taken within a round. The gateway's CPU time is measured on
an engine that answers at once: this process's time for a call less that of the built-in loop, with
the client's elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from earl_core.config import RunConfig, load_config
from earl_core.deployment.stage_deployment import StageDeployment
from earl_core.environments.base import Message, StepResult
from earl_core.environments.hosting.pool import EnvironmentPool
from earl_core.rollout.agent_loop import play
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.engine_factory import build_engine, load_chat_tokenizer
from earl_core.rollout.engines.engine import Completion, Engine, GenerationRequest
from earl_core.rollout.episode_player import PlaySettings
from earl_core.rollout.gateway.play import play_agents
from earl_core.trajectory.samples import EpisodeSpec, VersionSpan
from tools.harness import Report, build_model, interval, median, parser, publish

SIDES = {
    "loop": ("benchmarks.gateway:Talk", play),
    "gateway": ("agent:benchmarks.gateway:talk", play_agents),
}

API = AsyncOpenAI(base_url="http://unused", api_key="unused")


def _said(index: int, turn: int) -> Message:
    return {"role": "user", "content": f"Story {index}, part {turn}: go on telling it at length."}


class Talk:
    """Asks for the parts of a story."""

    def __init__(self, turns: int) -> None:
        self._turns = turns
        self._index = self._turn = 0

    def reset(self, prompt: int, seed: int) -> list[Message]:
        self._index, self._turn = prompt, 0
        return [_said(prompt, 0)]

    def step(self, text: str) -> StepResult:
        self._turn += 1
        over = self._turn == self._turns
        return StepResult([_said(self._index, self._turn)], float(len(text)), over)

    def close(self) -> None:
        pass


async def talk(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """`Talk`, through the API."""
    policy = API.with_options(base_url=base_url, api_key=api_key)
    messages: list[Any] = [_said(task["index"], 0)]
    length = 0
    for turn in range(task["turns"]):
        reply = await policy.chat.completions.create(model="policy", messages=messages)
        text = reply.choices[0].message.content or ""
        length += len(text)
        messages += [{"role": "assistant", "content": text}, _said(task["index"], turn + 1)]
    return float(length)


class Instant:
    """Answers at once, with as many tokens as it may. The methods that rollouts call."""

    lockstep, policy_version, max_model_len = False, 0, 2**20

    def __init__(self, token: int) -> None:
        self._token = token

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        counts = [request.max_tokens or 1 for request in requests]
        return [
            Completion([self._token] * n, [-1.0] * n, "length", [VersionSpan(0, 0, n)])
            for n in counts
        ]

    async def cancel(self, sequence_ids: Collection[int]) -> None:
        pass

    def finish(self, sequence_ids: Collection[int]) -> None:
        pass


async def measured(
    side: str, engine: Any, chat: ChatTokenizer, sessions: int, turns: int, tokens: int
) -> dict[str, float]:
    """Seconds, CPU seconds of this process, sampled tokens and calls of one round."""
    name, player = SIDES[side]
    settings = PlaySettings(max_turns=turns, max_tokens_per_turn=tokens, temperature=1.0)
    pool = EnvironmentPool(name, {"turns": turns}, step_timeout_seconds=600, concurrency=sessions)
    await pool.start()
    try:
        specs = [EpisodeSpec(number, number, number, number) for number in range(sessions)]
        began, cpu = time.perf_counter(), time.process_time()
        episodes = await player(engine, pool, chat, specs, settings)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    finally:
        await pool.stop()
    sampled = sum(sample.trained_tokens for each in episodes for sample in each.samples)
    calls = sum(each.turns for each in episodes)
    return {"seconds": seconds, "cpu": cpu, "tokens": sampled, "calls": calls}


async def rates(
    engine: Engine, chat: ChatTokenizer, options: argparse.Namespace, report: Report
) -> None:
    """tokens/s of both sides; the first round warms up."""
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(options.rounds + 1):
        for side in list(SIDES)[:: -1 if number % 2 else 1]:
            got = await measured(
                side, engine, chat, options.sessions, options.turns, options.tokens
            )
            if number:
                found[side].append(got["tokens"] / got["seconds"])
    shares = [a / b for a, b in zip(found["gateway"], found["loop"], strict=True)]
    for side, values in found.items():
        row = {"side": side, "sampled tokens/s": median(values)}
        report.rows.append(row | {"share": median(shares) if side == "gateway" else 1.0})
    report.headline["gateway_share"] = median(shares)
    report.notes.append(f"shares of {options.rounds} rounds: {interval(shares)}")


async def costs(chat: ChatTokenizer, options: argparse.Namespace, report: Report) -> None:
    """CPU time of a call, for short and long answers."""
    engine = Instant(chat.encode("a")[0])
    for tokens in (1, 16, 64):
        times = {}
        for side in SIDES:
            rounds = [
                await measured(side, engine, chat, options.sessions, options.turns, tokens)
                for _ in range(options.rounds + 1)
            ]
            times[side] = median([each["cpu"] / each["calls"] for each in rounds[1:]])
        row = {f"CPU ms/call, {side}": 1000 * value for side, value in times.items()}
        report.rows.append({"side": f"answers of {tokens} tokens at once", **row})
        report.headline[f"gateway_cpu_ms_{tokens}"] = 1000 * (times["gateway"] - times["loop"])


async def compare(config: RunConfig, options: argparse.Namespace, report: Report) -> None:
    chat = load_chat_tokenizer(config)
    await costs(chat, options, report)
    engine = build_engine(config, StageDeployment("rollout", threads=2))
    await engine.start()
    try:
        from earl_core.weights.load import manifest_from_directory

        await engine.play_under(manifest_from_directory(Path(config.model.path), 0))
        await rates(engine, chat, options, report)
    finally:
        await engine.stop()


def main() -> None:
    made = parser("Agents behind the gateway against the built-in loop.", overrides=True)
    made.add_argument("--config", default="demo", help="its model and engine")
    made.add_argument("--sessions", type=int, default=32)
    made.add_argument("--turns", type=int, default=4, help="calls of a session")
    made.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    made.add_argument("--rounds", type=int, default=5)
    options = made.parse_args()
    if options.quick:
        options.turns, options.rounds = 2, 1
    config = load_config(options.config, options.set)
    build_model(config)
    report = Report("gateway", "Agents behind the gateway")
    asyncio.run(compare(config, options, report))
    report.notes.append(
        f"{options.config}: {options.sessions} sessions of {options.turns} calls, answers of "
        f"{options.tokens} tokens at most; agents and environments in one process of their own."
    )
    publish(report, options)


if __name__ == "__main__":
    main()
