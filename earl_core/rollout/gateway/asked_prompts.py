"""Prompts that sessions of a gateway have asked, to find clients that cache answers.

A client with a cache (dspy, litellm and langchain have one) asks a prompt once and gives the answer
to all episodes: of these it is no sample, and what they do next is not the policy's.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence

from earl_core.environments.base import Message

logger = logging.getLogger(__name__)

CACHE = "if its client caches answers (dspy, litellm and langchain can), switch the cache off"
"""Advice for episodes that did not ask what they should have."""


class AskedPrompts:
    """Of all sessions of a gateway."""

    def __init__(self) -> None:
        self._first: dict[bytes, int] = {}
        self._own: dict[int, set[bytes]] = {}
        self._told = False

    def asked(self, episode: int, messages: Sequence[Message]) -> None:
        """Note the prompt of a request of an episode's session."""
        *_, digest = _digests(messages)
        self._first.setdefault(digest, episode)
        self._own.setdefault(episode, set()).add(digest)

    def answered_elsewhere(self, episode: int, messages: Sequence[Message], known: int) -> bool:
        """Tell whether a conversation holds an answer that its episode never asked for, and another
        did. known: how many of its messages the session knows. The first time it is logged."""
        answers = [
            number
            for number, message in enumerate(messages)
            if number >= max(known, 1) and message["role"] == "assistant"
        ]
        if not answers:
            return False
        digests, own = list(_digests(messages)), self._own.get(episode, set())
        for digest in (digests[number - 1] for number in answers):
            other = self._first.get(digest, episode)
            if other != episode and digest not in own:
                self._warn(episode, other)
                return True
        return False

    def forget(self, episode: int) -> None:
        """The episode is over."""
        self._own.pop(episode, None)

    def _warn(self, episode: int, other: int) -> None:
        if not self._told:
            self._told = True
            logger.warning(
                "episode %d goes on after an answer that it never asked for and episode %d did: %s",
                episode,
                other,
                CACHE,
            )


def _digests(messages: Sequence[Message]) -> Iterator[bytes]:
    """For each message a digest of the conversation up to it."""
    so_far = hashlib.sha256()
    for message in messages:
        so_far.update(json.dumps([message["role"], message["content"]]).encode())
        yield so_far.digest()
