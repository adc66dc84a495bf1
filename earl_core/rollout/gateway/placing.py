"""A request's place among the branches of its session, and the tokens of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from earl_core.environments.base import Message
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.chat.conversation import Conversation
from earl_core.rollout.chat.tool_calls import NO_TOOLS, Tools
from earl_core.rollout.gateway.branch import Branch, Turn
from earl_core.trajectory.samples import Sample, anchor_of


@dataclass(frozen=True)
class Prompt:
    """A request's place. conversation: None where the client renders. sample: the one that it
    extends, None where a new one begins. given: the tokens that follow it. messages: as they are
    compared. observation: the new messages' text. anchor: see `Sample.begin_turn`. opening: the
    tokens that the answer's message begins with; they stand at the end of the prompt."""

    branch: Branch
    conversation: Conversation | None
    sample: Sample | None
    given: list[int]
    messages: list[Message]
    observation: str
    anchor: int | None = None
    opening: Sequence[int] = ()

    @property
    def tokens(self) -> list[int]:
        """The whole prompt."""
        return [*self.sample.tokens, *self.given] if self.sample else self.given


class Placing:
    """A request on its way to its place among the branches: its branch is chosen and busy.

    `render` may run in another thread, with a tokenizer of that thread's; all else is the loop's.
    """

    def __init__(
        self,
        branch: Branch,
        messages: Sequence[Message],
        said: list[Message],
        tools: Tools,
        after: Turn | None,
        extends: bool,
        opening: str = "",
    ) -> None:
        self.branch = branch
        self.said = said
        """The messages as they are compared."""
        self.known = after.messages if after is not None else 0
        """How many of them the session has answered up to."""
        self._opening_text, self._opening = opening, list[int]()
        self._goes_on = False
        self._messages, self._tools = messages, tools
        self._after, self._extends = after, extends
        self._conversation: Conversation | None = None
        self._given: list[int] = []
        self._sample: Sample | None = None
        self._observation: str | None = None
        self._anchor = anchor_of(_told(messages)) if messages else None

    @classmethod
    def rendered(cls, branch: Branch, given: list[int], sample: Sample | None) -> Placing:
        """Make the placing of a client's own tokens."""
        placing = cls(branch, [], [], NO_TOOLS, None, sample is not None)
        placing._given, placing._sample, placing._observation = given, sample, ""
        return placing

    @classmethod
    def going_on(
        cls,
        branch: Branch,
        messages: Sequence[Message],
        said: list[Message],
        turn: Turn,
        opening: list[int],
        extends: bool,
    ) -> Placing:
        """Make the placing of a request that goes on with a recorded answer itself. opening: the
        tokens of that answer, which are not encoded again."""
        placing = cls(branch, messages, said, NO_TOOLS, turn, extends)
        placing._goes_on, placing._opening = True, opening
        if extends:
            placing._sample = turn.sample
        else:
            ended = len(turn.answer) - len(opening)
            placing._given = turn.sample.tokens[: turn.tokens - ended]
        return placing

    def render(self, chat: ChatTokenizer) -> None:
        """Find the tokens. Raises `ConfigError` for messages that the template cannot render."""
        at = self._after
        if self._observation is not None:
            self._observation = chat.raw_text_of(self._given)
            return
        if self._goes_on:
            assert at is not None
            assert at.conversation is not None
            self._conversation = at.conversation.copy(chat)
            return
        if self._opening_text:
            self._opening = chat.outside(self._opening_text.removeprefix(chat.answer_prefix))
        self._follow(chat, at)
        self._given = [*self._given, *self._opening]

    def _follow(self, chat: ChatTokenizer, at: Turn | None) -> None:
        if at is None:
            self._conversation = Conversation(chat, self._tools)
            self._given = self._conversation.begin(self._messages)
            return
        assert at.conversation is not None
        self._conversation = at.conversation.copy(chat)
        new = self._messages[at.messages :]
        given, begins = self._conversation.follow(at.answer, new)
        if self._extends:
            self._sample = None if begins else at.sample
        elif not begins:
            given = at.sample.tokens[: at.tokens] + given
        self._given = given

    def prompt(self, chat: ChatTokenizer) -> Prompt:
        """The place. chat: the loop's tokenizer."""
        if self._observation is not None:
            said = self._observation
            return Prompt(self.branch, None, self._sample, self._given, [], said)
        assert self._conversation is not None
        new = self._messages[self._after.messages :] if self._after else self._messages
        return Prompt(
            self.branch,
            self._conversation.copy(chat),
            self._sample,
            self._given,
            self.said,
            _text(new if self._extends else self._messages),
            self._anchor,
            self._opening,
        )


def _told(messages: Sequence[Message]) -> list[Message]:
    """Choose the messages of a request that its answer may observe: those that follow the last
    answer in it, and those that say what the policy is to be. Agents give answers back as they
    like, or not at all."""
    answers = [at for at, each in enumerate(messages[:-1]) if each["role"] == "assistant"]
    since = answers[-1] + 1 if answers else 0
    return [each for at, each in enumerate(messages) if at >= since or each["role"] == "system"]


def _text(messages: Sequence[Message]) -> str:
    return "\n".join(message["content"] for message in messages)
