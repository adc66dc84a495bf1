"""Products of two numbers, too large for a small model's head: it has to call the calculator.

The prompt shows one to four examples of calls. With four SmolLM2-135M mostly calls from the
beginning, with one or two never: there is something to learn, and something to learn it from.
Without any it has to be shown: `demonstrations.py`.
"""

import random
from collections.abc import Sequence

from earl_core.environments.base import FunctionCall, Message, StepResult, ToolCall
from earl_core.environments.rewards import number_by_tools

RULES = "Call the calculator for every product, then say its result."
EXAMPLES = ((23, 47), (58, 31), (76, 92), (19, 64))


class Multiplication:
    """One episode. The prompt is the pair of factors and the number of examples in front.

    An answer with a call of a tool is a turn that EARL does by itself: it runs the tool and tells
    `tools_used`. `step` gets the first answer without one, and ends the episode.
    """

    def __init__(self, most_examples: int = len(EXAMPLES)) -> None:
        self._most = most_examples
        self._used: list[Message] = []
        self._product = self._examples = 0

    def reset(self, prompt: int, seed: int) -> list[Message]:
        """Begin. All randomness comes from `prompt` and `seed`: an episode may be replayed."""
        source = random.Random(f"multiplication/{prompt}")
        one, other = source.randint(11, 99), source.randint(11, 99)
        self._used, self._product = [], one * other
        self._examples = 1 + prompt % self._most if self._most else 0
        examples = [m for pair in EXAMPLES[: self._examples] for m in example(*pair)]
        return [{"role": "system", "content": RULES}, *examples, asked(one, other)]

    def tools_used(self, messages: Sequence[Message]) -> None:
        """Take an answer with calls, and their results."""
        self._used += messages

    def step(self, text: str) -> StepResult:
        """1 for the right product, 0.1 for a call that was read and a wrong answer after it."""
        reward, told = number_by_tools(text, {"answer": str(self._product)}, self._used)
        told[f"called_after_{self._examples}_examples"] = told["called"]
        outcome = "right" if told["correct"] else "called" if told["called"] else "no call"
        outcomes = ["right", "called", "no call"]
        info = {"outcome": outcome, "outcomes": outcomes, "metrics": told}
        return StepResult([], reward, True, info)

    def close(self) -> None:
        """Free what the episode holds."""


def asked(one: int, other: int) -> Message:
    """The question."""
    return {"role": "user", "content": f"What is {one} * {other}?"}


def example(one: int, other: int) -> list[Message]:
    """Question, call, result and answer."""
    called = FunctionCall(name="calculator", arguments={"expression": f"{one} * {other}"})
    call = ToolCall(id="1", type="function", function=called)
    result = str(one * other)
    return [
        asked(one, other),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result, "tool_call_id": "1", "name": "calculator"},
        {"role": "assistant", "content": result},
    ]
