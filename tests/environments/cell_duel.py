"""An environment of verifiers as its users write them, a package of one module with two seats.

Tests install it into an interpreter that has verifiers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["Chat", "Duel", "Hands"]


CLIENT = httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))


class HandData(vf.TaskData):
    cell: int


class Hand(vf.Task[HandData]):
    pass


class Hands(vf.Taskset[Hand, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[Hand]:
        for index in count():
            yield Hand(HandData(idx=index, prompt=None, cell=index * 7 % 9 + 1))


class DuelConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class Duel(vf.Env[DuelConfig]):
    """Two guess a cell, twice each, and hear how far the other was; the nearer wins."""

    async def run(self, task: Any, agents: Any) -> None:
        blank = vf.Task(vf.TaskData(idx=task.data.idx, prompt=None))
        far = [0, 0]
        async with (
            agents.first.interaction(blank) as first,
            agents.second.interaction(blank) as second,
        ):
            told = "123|456|789"
            for _ in range(2):
                for seat, player in enumerate((first, second)):
                    segment = await player.turn(told)
                    guess = re.search("[1-9]", segment.last_reply)
                    missed = abs(int(guess[0]) - task.data.cell) if guess else 9
                    far[seat] += missed
                    told = f"{missed}"
        for seat, player in enumerate((first, second)):
            player.trace.record_reward("nearer", (far[1 - seat] - far[seat]) / 18)
            player.trace.record_metric("far", float(far[seat]))


class Chat(vf.Harness[vf.HarnessConfig]):
    """Asks for one answer, without a program of its own."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    SUPPORTS_RESUME = True

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> vf.ProgramResult:
        _, messages = self.resolve_prompt(data)
        body = {"model": ctx.model, "messages": [message_to_wire(each) for each in messages]}
        reply = await CLIENT.post(
            f"{endpoint}/chat/completions",
            json=body,
            headers={"Authorization": f"Bearer {secret}"},
        )
        reply.raise_for_status()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
