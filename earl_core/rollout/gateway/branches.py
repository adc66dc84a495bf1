"""The token streams of one session, and which of them a request goes on with.

A request repeats its whole conversation as text. Where its messages extend a branch, the next
prompt is that branch's tokens and the template's tokens for the new messages: what was sampled is
never encoded again. Where they extend an earlier turn, or a branch that is being answered, a new
branch begins with the tokens until that turn, which are then given and not trained a second time.
Otherwise a new branch begins with the messages.

Clients that render conversations themselves repeat them as tokens: where these go on after a
branch's last answer, they extend it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from earl_core.environments.base import Message
from earl_core.rollout.chat.chat import ChatTokenizer, Conversation
from earl_core.rollout.chat.tool_calls import NO_TOOLS, Tools
from earl_core.rollout.engines.engine import Completion
from earl_core.trajectory.samples import Sample, anchor_of, derive_seed

_RENDERED = "rendered by the client"
"""Mark in the place of the tools of a branch."""


@dataclass(frozen=True)
class _Turn:
    """The state after an answer. messages: how many there are. tokens: of its sample."""

    messages: int
    sample: Sample
    tokens: int
    answer: Sequence[int]
    conversation: Conversation | None


@dataclass(eq=False)
class Branch:
    """One conversation. tools: the key of those that the model may call in it. messages: as they
    are compared, answers included.

    number: in the order of the first requests. origin: what its draws depend on beside the episode
    and the call. key: of its first request. busy: whether a request of it is being answered.
    """

    number: int
    origin: int
    tools: str
    key: tuple[str, ...]
    messages: list[Message] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    turns: list[_Turn] = field(default_factory=list)
    busy: bool = True


@dataclass(frozen=True)
class Prompt:
    """A request's place. conversation: None where the client renders. sample: the one that it
    extends, None where a new one begins. given: the tokens that follow it. messages: as they are
    compared. observation: the new messages' text. anchor: see `Sample.begin_turn`."""

    branch: Branch
    conversation: Conversation | None
    sample: Sample | None
    given: list[int]
    messages: list[Message]
    observation: str
    anchor: int | None = None

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
        after: _Turn | None,
        extends: bool,
    ) -> None:
        self.branch = branch
        self._messages, self._said, self._tools = messages, said, tools
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

    def render(self, chat: ChatTokenizer) -> None:
        """Find the tokens. Raises `ConfigError` for messages that the template cannot render."""
        at = self._after
        if self._observation is not None:
            self._observation = chat.raw_text_of(self._given)
            return
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
            self._said,
            _text(new if self._extends else self._messages),
            self._anchor,
        )


class Branches:
    """All branches of a session. seed: of its episode."""

    def __init__(self, chat: ChatTokenizer, seed: int) -> None:
        self._chat, self._seed = chat, seed
        self.begun = 0
        """Branches so far, those given up included."""
        self._answers = 0
        self._equal: Counter[tuple[str, ...]] = Counter()
        self.all: list[Branch] = []

    @property
    def samples(self) -> list[Sample]:
        """List the samples of all branches, in their order."""
        return [sample for branch in self.all for sample in branch.samples]

    def place(self, messages: Sequence[Message], tools: Tools = NO_TOOLS) -> Placing:
        """Find the branch on which these messages go on; it is busy until `answer` or `give_up`."""
        said = [_compared(message) for message in messages]
        branch, at = self._longest(said, tools.key)
        if branch is None:
            return Placing(self._new(said, tools.key), messages, said, tools, at, False)
        branch.busy = True
        return Placing(branch, messages, said, tools, at, True)

    def prompt(self, messages: Sequence[Message], tools: Tools = NO_TOOLS) -> Prompt:
        """The same with its tokens. Raises `ConfigError` for messages that the chat template cannot
        render."""
        placing = self.place(messages, tools)
        try:
            placing.render(self._chat)
        except BaseException:
            self.give_up(placing)
            raise
        return placing.prompt(self._chat)

    def place_tokens(self, tokens: list[int]) -> Placing:
        """The same of a conversation as tokens."""
        standing: Branch | None = None
        for branch in self.all:
            if branch.tools == _RENDERED and not branch.busy:
                said = branch.samples[-1].tokens
                best = len(standing.samples[-1].tokens) if standing else 0
                if best < len(said) < len(tokens) and tokens[: len(said)] == said:
                    standing = branch
        if standing is not None:
            standing.busy = True
            sample = standing.samples[-1]
            return Placing.rendered(standing, tokens[len(sample.tokens) :], sample)
        digest = hashlib.sha256(array("q", tokens).tobytes()).hexdigest()
        new_branch = self._new([{"role": "", "content": digest}], _RENDERED)
        return Placing.rendered(new_branch, tokens, None)

    def answer(self, prompt: Prompt, completion: Completion) -> Message:
        """Record the answer; returns it."""
        branch, conversation = prompt.branch, prompt.conversation
        if conversation is None:
            text = self._chat.raw_text_of(completion.tokens)
            message = Message(role="assistant", content=text)
        else:
            answer = conversation.read(completion.tokens)
            message = conversation.message(answer)
            text = answer.raw if answer.calls else answer.text
        sample = prompt.sample
        if sample is None:
            sample = Sample()
            branch.samples.append(sample)
        sample.begin_turn(prompt.given, prompt.observation, prompt.anchor)
        sample.answer(completion.tokens, completion.logprobs, completion.spans, text, self._answers)
        self._answers += 1
        branch.messages = [*prompt.messages, _compared(message)]
        branch.turns.append(
            _Turn(
                len(branch.messages),
                sample,
                len(sample.tokens),
                completion.tokens,
                conversation,
            )
        )
        branch.busy = False
        return message

    def give_up(self, prompt: Prompt | Placing) -> None:
        """The request gets no answer; it may come again."""
        prompt.branch.busy = False
        if not prompt.branch.turns:
            self.all.remove(prompt.branch)
            self._equal[prompt.branch.key] -= 1

    def draw_seed(self, branch: Branch) -> int:
        """Seed of a branch's next answer: of episode, branch and call, whatever came before it."""
        return derive_seed(self._seed, "draw", branch.origin, len(branch.turns))

    def _longest(self, said: list[Message], tools: str) -> tuple[Branch | None, _Turn | None]:
        """The turn after which fewest messages are new, and its branch if that can be extended."""
        longest: _Turn | None = None
        extended: Branch | None = None
        for branch in (branch for branch in self.all if branch.tools == tools):
            pairs = zip(branch.messages, said, strict=False)
            equal = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            known = [turn for turn in branch.turns if turn.messages <= min(equal, len(said) - 1)]
            if not known:
                continue
            free = known[-1] is branch.turns[-1] and not branch.busy
            # Of equally long ones, one that can be extended.
            best = (0, False) if longest is None else (longest.messages, extended is not None)
            if (known[-1].messages, free) > best:
                longest, extended = known[-1], branch if free else None
        return extended, longest

    def _new(self, said: list[Message], tools: str) -> Branch:
        key = _key(said, tools)
        branch = Branch(self.begun, derive_seed(self._equal[key], *key), tools, key)
        self.begun += 1
        self._equal[key] += 1
        self.all.append(branch)
        return branch


def _compared(message: Message) -> Message:
    """Clients may change the white space around an answer that they give back, and name its calls
    anew."""
    role, content = message["role"], message["content"]
    compared: Message = {
        "role": role,
        "content": content.strip() if role == "assistant" else content,
    }
    if "tool_calls" in message:
        compared["tool_calls"] = [{**call, "id": ""} for call in message["tool_calls"]]
    return compared


def _key(messages: Sequence[Message], tools: str) -> tuple[str, ...]:
    """Return the key on which the draws of a branch depend."""
    texts = [tools] if tools else []
    for each in messages:
        texts += [each["role"], each["content"]]
        if "tool_calls" in each:
            texts.append(json.dumps(each["tool_calls"], sort_keys=True))
    return tuple(texts)


def _told(messages: Sequence[Message]) -> list[Message]:
    """Choose the messages of a request that its answer may observe: those that follow the last
    answer in it, and those that say what the policy is to be. Agents give answers back as they
    like, or not at all."""
    answers = [at for at, each in enumerate(messages[:-1]) if each["role"] == "assistant"]
    since = answers[-1] + 1 if answers else 0
    return [each for at, each in enumerate(messages) if at >= since or each["role"] == "system"]


def _text(messages: Sequence[Message]) -> str:
    return "\n".join(message["content"] for message in messages)
