"""A conversation of an environment with the policy, over HTTP with the standard library alone."""

from __future__ import annotations

import http.client
import json
from urllib.parse import urlsplit

from earl_core.environments.agent import OPPONENT
from earl_core.environments.base import Message
from earl_core.system.errors import EarlError


class PolicyConversation:
    """Blocks its thread while it waits, which the deadline of the environment's step ends: that
    stands still while the engine is away. base_url, api_key: of the environment's `policy`."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self._url = urlsplit(base_url)
        self._key = api_key
        self._messages: list[Message] = []

    def ask(self, *messages: Message) -> str:
        """The policy's answer to these messages, after those before. Raises `EarlError`."""
        self._messages += messages
        body = json.dumps({"model": OPPONENT, "messages": self._messages})
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        connection = http.client.HTTPConnection(self._url.netloc)
        try:
            connection.request("POST", f"{self._url.path}/chat/completions", body, headers)
            reply = connection.getresponse()
            said = json.loads(reply.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise EarlError(
                f"the policy gave no answer: {type(error).__name__}: {error}"
            ) from error
        finally:
            connection.close()
        if reply.status != 200:
            raise EarlError(f"the policy gave no answer: {said['error']['message']}")
        content = str(said["choices"][0]["message"]["content"])
        self._messages.append({"role": "assistant", "content": content})
        return content
