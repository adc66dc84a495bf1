"""The token streams of one session, and which of them a request goes on with.

A request repeats its whole conversation as text. Where its messages extend a branch, the next
prompt is that branch's tokens and the template's tokens for the new messages: what was sampled is
never encoded again, also where an answer comes back without its reasoning or the text beside a call
(`repeated`). Where they extend an earlier turn, or a branch that is being answered, a new
branch begins with the tokens until that turn, which are then given and not trained a second time.
Otherwise a new branch begins with the messages.

Clients that render conversations themselves repeat them as tokens: where these go on after a
branch's last answer, they extend it.
"""

from __future__ import annotations

import hashlib
import itertools
import string
from array import array
from collections.abc import Sequence

from earl_core.environments.base import Message
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.chat.tool_calls import NO_TOOLS, Tools
from earl_core.rollout.engines.engine import Completion
from earl_core.rollout.gateway.branch import Branch, Turn, branch_key, compared
from earl_core.rollout.gateway.placing import Placing, Prompt
from earl_core.rollout.gateway.repeated import repeated
from earl_core.trajectory.forms import Form
from earl_core.trajectory.samples import Sample, derive_seed

_RENDERED = "rendered by the client"
"""Mark in the place of the tools of a branch."""

_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9


class Branches:
    """All branches of a session. seed: of its episode."""

    def __init__(self, chat: ChatTokenizer, seed: int) -> None:
        self._chat, self._seed = chat, seed
        self.begun = 0
        """Branches so far, those given up included."""
        self._answers = 0
        self._equal: dict[tuple[str, ...], set[int]] = {}
        self.all: list[Branch] = []

    @property
    def samples(self) -> list[Sample]:
        """List the samples of all branches, in their order."""
        return [sample for branch in self.all for sample in branch.samples]

    def place(
        self,
        messages: Sequence[Message],
        tools: Tools = NO_TOOLS,
        opening: str = "",
        role: str = "",
    ) -> Placing:
        """Find the branch on which these messages go on; it is busy until `answer` or `give_up`.

        Conversations of other roles are others. opening: text that the message of the answer begins
        with. Where it is what the policy has answered here, the answer goes on after its tokens.
        """
        said = [compared(message) for message in messages]
        if opening and (going_on := self._going_on(messages, said, (tools.key, role), opening)):
            return going_on
        known = [each for each in self.all if (each.tools, each.role) == (tools.key, role)]
        branch, at, said = repeated(known, said)
        if branch is None:
            opened = [*said, Message(role="assistant", content=opening)] if opening else said
            new = self._new(opened, tools.key, role)
            return Placing(new, messages, said, tools, at, False, opening)
        branch.busy = True
        return Placing(branch, messages, said, tools, at, True, opening)

    def prompt(
        self, messages: Sequence[Message], tools: Tools = NO_TOOLS, opening: str = ""
    ) -> Prompt:
        """The same with its tokens. Raises `ConfigError` for messages that the chat template cannot
        render."""
        placing = self.place(messages, tools, opening)
        try:
            placing.render(self._chat)
        except BaseException:
            self.give_up(placing)
            raise
        return placing.prompt(self._chat)

    def place_tokens(self, tokens: list[int], role: str = "") -> Placing:
        """The same of a conversation as tokens."""
        standing: Branch | None = None
        for branch in self.all:
            if (branch.tools, branch.role) == (_RENDERED, role) and not branch.busy:
                said = branch.samples[-1].tokens
                best = len(standing.samples[-1].tokens) if standing else 0
                if best < len(said) < len(tokens) and tokens[: len(said)] == said:
                    standing = branch
        if standing is not None:
            standing.busy = True
            sample = standing.samples[-1]
            return Placing.rendered(standing, tokens[len(sample.tokens) :], sample)
        digest = hashlib.sha256(array("q", tokens).tobytes()).hexdigest()
        new_branch = self._new([{"role": "", "content": digest}], _RENDERED, role)
        return Placing.rendered(new_branch, tokens, None)

    def answer(
        self,
        prompt: Prompt,
        completion: Completion,
        stop: Sequence[str] = (),
        form: Form | None = None,
    ) -> tuple[Message, str]:
        """Record the answer; returns it, without what it was opened with and cut before the first
        of the strings `stop`, and that string. form: that it was held to. The ids of its calls are
        no other's in the session."""
        branch, conversation = prompt.branch, prompt.conversation
        stopped_by = ""
        if conversation is None:
            text = self._chat.raw_text_of(completion.tokens)
            message = Message(role="assistant", content=text)
        else:
            tokens = [*prompt.opening, *completion.tokens]
            answer = conversation.read(tokens, stop, prompt.opening)
            stopped_by = answer.stopped_by
            message = answer.message(self._call_ids(branch, len(answer.calls)))
            text = answer.raw if answer.calls else answer.text
        sample = prompt.sample
        if sample is None:
            sample = Sample(role=branch.role)
            branch.samples.append(sample)
        sample.begin_turn(prompt.given, prompt.observation, prompt.anchor)
        sampled = completion.tokens, completion.logprobs, completion.spans
        sample.answer(*sampled, text, self._answers, form, completion.routing)
        self._answers += 1
        branch.messages = [*prompt.messages, compared(message)]
        branch.turns.append(
            Turn(
                len(branch.messages),
                sample,
                len(sample.tokens),
                [*prompt.opening, *completion.tokens],
                conversation,
                bool(stopped_by),
            )
        )
        branch.busy = False
        return self._without_opening(message, prompt) if prompt.opening else message, stopped_by

    def give_up(self, prompt: Prompt | Placing) -> None:
        """The request gets no answer; it may come again."""
        branch = prompt.branch
        branch.busy = False
        if not branch.turns:
            self.all.remove(branch)
            self._equal[branch.key].discard(branch.equal)

    def draw_seed(self, branch: Branch) -> int:
        """Seed of a branch's next answer: of episode, branch and call, whatever came before it."""
        return derive_seed(self._seed, "draw", branch.origin, len(branch.turns))

    def _call_ids(self, branch: Branch, count: int) -> list[str]:
        """Nine letters and digits each, which is all that some templates take (Mistral's). They
        follow from the conversation, whatever is answered beside it."""
        turn = len(branch.turns)
        return [
            _short(derive_seed(self._seed, "call", branch.origin, turn, number))
            for number in range(count)
        ]

    def _without_opening(self, message: Message, prompt: Prompt) -> Message:
        opening, content = self._chat.text_of(prompt.opening), message["content"]
        if not content.startswith(opening):  # it ends amid a character
            opening = self._chat.beginning_of(prompt.opening)
        return {**message, "content": content.removeprefix(opening)}

    def _going_on(
        self,
        messages: Sequence[Message],
        said: list[Message],
        kind: tuple[str, str],
        opening: str,
    ) -> Placing | None:
        """The place after a recorded answer that is the opening; where that was ended by a token,
        or is being answered already, a new branch begins with what stands before. kind: tools and
        role."""
        opened = [*said, compared(Message(role="assistant", content=opening))]
        size = len(opened)
        fork: tuple[Turn, list[int]] | None = None
        for branch in self.all:
            turn = next((each for each in reversed(branch.turns) if each.messages == size), None)
            if turn is None or turn.cut:
                continue
            if (branch.tools, branch.role) != kind or branch.messages[:size] != opened:
                continue
            answer = self._chat.answer_of(turn.answer)
            ended = len(answer) < len(turn.answer)
            if turn is branch.turns[-1] and not branch.busy and not ended:
                branch.busy = True
                return Placing.going_on(branch, messages, said, turn, answer, True)
            fork = turn, answer
        if fork is None:
            return None
        new = self._new(opened, *kind)
        return Placing.going_on(new, messages, said, *fork, False)

    def _new(self, said: list[Message], tools: str, role: str) -> Branch:
        key = branch_key(said, tools, role)
        taken = self._equal.setdefault(key, set())
        # The least that is free: what was given up may come again, and no other draws as it does.
        equal = next(each for each in itertools.count() if each not in taken)
        taken.add(equal)
        branch = Branch(self.begun, derive_seed(equal, *key), tools, key, equal, role=role)
        self.begun += 1
        self.all.append(branch)
        return branch


def _short(number: int) -> str:
    digits = []
    for _ in range(_ID_LENGTH):
        number, digit = divmod(number, len(_ID_CHARACTERS))
        digits.append(_ID_CHARACTERS[digit])
    return "".join(digits)
