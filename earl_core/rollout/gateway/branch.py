"""One conversation of a session: its messages as they are compared, its samples, its turns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from earl_core.environments.base import Message
from earl_core.rollout.chat.conversation import Conversation
from earl_core.trajectory.samples import Sample


@dataclass(frozen=True)
class Turn:
    """The state after an answer. messages: how many there are. tokens: of its sample. answer: the
    tokens of the whole message, those that it was opened with included. cut: whether its text is
    that of a part of them."""

    messages: int
    sample: Sample
    tokens: int
    answer: Sequence[int]
    conversation: Conversation | None
    cut: bool = False


@dataclass(eq=False)
class Branch:
    """One conversation. tools: the key of those that the model may call in it. messages: as they
    are compared, answers included.

    number: in the order of the first requests. origin: what its draws depend on beside the episode
    and the call. key: of its first request. equal: its number among the branches of this key.
    busy: whether a request of it is being answered. role: that its requests name.
    """

    number: int
    origin: int
    tools: str
    key: tuple[str, ...]
    equal: int
    messages: list[Message] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    busy: bool = True
    role: str = ""

    def name(self, role: str) -> None:
        """Give the conversation, and what it has of samples, a role."""
        self.role = role
        for sample in self.samples:
            sample.role = role


def compared(message: Message) -> Message:
    """Clients may change the white space around an answer that they give back, and name its calls
    anew."""
    role, content = message["role"], message["content"]
    compared: Message = {
        "role": role,
        "content": content.strip() if role == "assistant" else content,
    }
    if "reasoning_content" in message:
        compared["reasoning_content"] = message["reasoning_content"]
    if "tool_calls" in message:
        compared["tool_calls"] = [{**call, "id": ""} for call in message["tool_calls"]]
    return compared


def branch_key(messages: Sequence[Message], tools: str, role: str = "") -> tuple[str, ...]:
    """Return the key on which the draws of a branch depend."""
    texts = [each for each in (role, tools) if each]
    for each in messages:
        texts += [each["role"], each["content"]]
        if "reasoning_content" in each:
            texts.append(each["reasoning_content"])
        if "tool_calls" in each:
            texts.append(json.dumps(each["tool_calls"], sort_keys=True))
    return tuple(texts)
