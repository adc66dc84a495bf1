"""Tools that a prompt brings are shown to the policy, and nobody runs them."""

from __future__ import annotations

from earl_core.environments.base import Message, StepResult
from earl_core.rollout.chat.tool_calls import Tools
from tests.rollout.scripted import SayingEngine, ScriptedEnvironments
from tests.rollout.test_agent_loop import BOTH, CHAT, STOP, played


@BOTH
def test_calls_of_tools_that_a_prompt_brings_are_given_as_they_are_written(lockstep: bool) -> None:
    schema = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    said = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'

    class Bringing(ScriptedEnvironments):
        heard: list[str]

        async def reset(self, episode_id: int, prompt: int, seed: int) -> list[Message]:
            (message,) = await super().reset(episode_id, prompt, seed)
            self.heard = []
            return [{**message, "tools": [schema]} if episode_id == 0 else message]

        async def step(self, episode_id: int, text: str) -> StepResult:
            self.heard.append(text)
            return await super().step(episode_id, text)

    tokens = [*CHAT.encode(said), STOP]
    pool = Bringing(lambda i: 1)
    engine = SayingEngine(lambda i, turn: tokens, lockstep=lockstep)
    first, other = played(engine, pool, 2)
    assert pool.heard == [said, said]
    assert first.finish_reason == other.finish_reason == "done"
    shown = CHAT._tokenizer.decode(first.samples[0].tokens)
    asked = CHAT.render([{"role": "user", "content": "start"}], Tools([schema]))
    assert shown == asked + said + CHAT._tokenizer.decode([STOP])
    # The next episode's prompt brings none.
    assert CHAT._tokenizer.decode(other.samples[0].tokens).count('"add"') == 1
