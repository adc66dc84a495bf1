"""The token side of one conversation: which tokens follow what stands there."""

from __future__ import annotations

from collections.abc import Sequence

from earl_core.environments.base import Message, call_id
from earl_core.rollout.chat.chat import MARK, ChatTokenizer
from earl_core.rollout.chat.disguise import Sampled
from earl_core.rollout.chat.tool_calls import NO_TOOLS, Answer, Tools


class Conversation:
    """The token side of one episode: which tokens come next, and whether a new sample begins.

    With a template that keeps earlier answers in place (`ChatTokenizer.prefix_stable`) a next
    prompt always extends the tokens before it. With one that rewrites them (drops reasoning, say)
    the conversation is rendered again each turn, and where that does not extend what stands
    there, a new sample begins with the whole conversation. Answers without reasoning are rendered
    as marks: templates write calls of tools anew, with other spaces than the model's.
    """

    def __init__(self, chat: ChatTokenizer, tools: Tools = NO_TOOLS) -> None:
        self._chat = chat
        self._tools = tools
        self._messages: list[Message] = []
        self._text = ""
        self._marked: dict[str, str] = {}
        self._calls = 0
        if tools:
            # Raises what is wrong with them before anything is sampled.
            _ = chat.parser

    def copy(self, chat: ChatTokenizer | None = None) -> Conversation:
        """Another one that stands where this one does. chat: what it uses, a copy of this one's."""
        other = Conversation(chat or self._chat, self._tools)
        other._messages, other._text = list(self._messages), self._text
        other._calls, other._marked = self._calls, dict(self._marked)
        return other

    def begin(self, messages: Sequence[Message]) -> list[int]:
        """The first prompt."""
        if not self._chat.prefix_stable(self._tools):
            self._messages = list(messages)
            self._text = self._chat.render(messages, self._tools)
        return self._chat.first_prompt(messages, self._tools)

    def read(
        self, sampled: Sequence[int], stop: Sequence[str] = (), opening: Sequence[int] = ()
    ) -> Answer:
        """An answer and the calls of the conversation's tools in it; see `ChatTokenizer.read`."""
        return self._chat.read(sampled, self._tools, stop, opening)

    def message(self, answer: Answer) -> Message:
        """An answer as a message; its calls are numbered through the conversation."""
        first, self._calls = self._calls, self._calls + len(answer.calls)
        return answer.message([call_id(number) for number in range(first, self._calls)])

    def complaint(self, answer: Answer) -> Message:
        """Make the message to a model whose calls could not be read."""
        text = f"Error: the call could not be read: {answer.error}"
        number, self._calls = self._calls, self._calls + 1
        name = self._tools.schemas[0]["function"]["name"]
        return Message(role="tool", content=text, tool_call_id=call_id(number), name=name)

    def follow(self, sampled: Sequence[int], messages: Sequence[Message]) -> tuple[list[int], bool]:
        """Tokens after an answer, and whether they begin a new sample (then they are a whole
        prompt) or extend the tokens before them."""
        chat = self._chat
        if chat.prefix_stable(self._tools):
            return chat.next_prompt(sampled, messages, self._tools), False
        answer = content = chat.own(chat.raw_text_of(sampled))
        if "think>" not in answer:
            content = Sampled(f"{MARK}{len(self._messages)}.")
            self._marked[content] = answer
        self._messages += [{"role": "assistant", "content": content}, *messages]
        standing, self._text = self._text, chat.render(self._messages, self._tools)
        before, found, after = self._text[len(standing) :].partition(content)
        if not self._text.startswith(standing) or not found or before.strip():
            whole = self._text
            for mark, said in self._marked.items():
                whole = whole.replace(mark, said)
            return chat.encode(whole) + chat.prefix_tokens, True
        return chat.next_tokens(sampled, chat.encode(after)), False
