"""Whether an answer that a request repeats is one that was recorded.

Agents give answers back as they keep them: without the text beside a call, without reasoning, or
with reasoning apart from the text.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence

from earl_core.environments.base import Message
from earl_core.rollout.gateway.branch import Branch, Turn

_REASONING_ENDS = "</think>"


def repeated(
    branches: Sequence[Branch], said: list[Message]
) -> tuple[Branch | None, Turn | None, list[Message]]:
    """The turn after which fewest messages are new, its branch if that can be extended, and the
    messages with the answers as they were recorded.

    An answer with less than was said is the recorded one where no other recorded conversation could
    be meant. branches: those with the request's tools.
    """
    found = _longest(branches, said, operator.eq)
    answers = [at for at, each in enumerate(said) if each["role"] == "assistant"]
    known = found[1].messages if found[1] else 0
    if not answers or known > answers[-1]:
        return *found, said
    branch, turn = _longest(branches, said, _is_what_is_left)
    if turn is None or turn.messages <= known:
        return *found, said
    meant = [
        each.messages[: turn.messages]
        for each in branches
        if _ends(each, said, _is_what_is_left, turn.messages)
    ]
    if any(each != meant[0] for each in meant):
        return *found, said
    return branch, turn, [*meant[0], *said[turn.messages :]]


def _longest(
    branches: Sequence[Branch], said: list[Message], alike: Callable[[Message, Message], bool]
) -> tuple[Branch | None, Turn | None]:
    longest: Turn | None = None
    extended: Branch | None = None
    for branch in branches:
        known = _known(branch, said, alike)
        if not known:
            continue
        free = known[-1] is branch.turns[-1] and not branch.busy
        # Of equally long ones, one that can be extended.
        best = (0, False) if longest is None else (longest.messages, extended is not None)
        if (known[-1].messages, free) > best:
            longest, extended = known[-1], branch if free else None
    return extended, longest


def _known(
    branch: Branch, said: list[Message], alike: Callable[[Message, Message], bool]
) -> list[Turn]:
    """The turns of the branch that the messages repeat and go on after."""
    pairs = zip(branch.messages, said, strict=False)
    equal = sum(1 for _ in itertools.takewhile(lambda pair: alike(*pair), pairs))
    return [turn for turn in branch.turns if turn.messages <= min(equal, len(said) - 1)]


def _ends(
    branch: Branch, said: list[Message], alike: Callable[[Message, Message], bool], size: int
) -> bool:
    return any(turn.messages == size for turn in _known(branch, said, alike))


def _is_what_is_left(recorded: Message, said: Message) -> bool:
    """Tell whether a message is the recorded one, or what agents keep of it."""
    if recorded == said:
        return True
    calls = recorded.get("tool_calls")
    if {recorded["role"], said["role"]} != {"assistant"} or calls != said.get("tool_calls"):
        return False
    content, reasoning = said["content"], said.get("reasoning_content")
    # What follows the reasoning may have its end in it, too.
    for thought, _, kept in (
        recorded["content"].rpartition(_REASONING_ENDS),
        recorded["content"].partition(_REASONING_ENDS),
    ):
        kept = kept.strip()
        left = content in ("", kept) if calls else content == kept != ""
        if left and reasoning in (None, thought.removeprefix("<think>").strip()):
            return True
    return False
