"""Reward functions that ask a model behind an HTTP endpoint: a judge, or a reward model.

They use the standard library alone, because they may run under a Python without our packages. A
refusal of the endpoint and an answer without a score raise: the stage asks again.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from earl_core.environments.endpoints import open_endpoint, read_reply
from earl_core.environments.rewards.judgement import read_score
from earl_core.system.errors import ConfigError, EarlError

_FIELD = re.compile(r"\{([A-Za-z_]\w*(?:\.\w+)*)\}")
_SHOWN = 300


class JudgeFailed(EarlError):
    """An endpoint that gave no score."""

    expected = False


class Judge:
    """A model that is asked by OpenAI's chat completions how good an episode was.

    base_url: URL of the endpoint, up to `/v1`. model: the model's name there. api_key: bearer
        token, as a reference. prompt: the question; `{conversation}` is the whole
        episode, `{question}` what the policy was first told, `{answer}` its last answer, and
        `{scoring.name}` a value that the environment gives for scoring.
    pattern: a regular expression whose first group is the score; the last match counts. None: what
        `judgement.read_score` is certain of. scale: the least and the greatest score that may be
        given; they become 0 and 1.
    temperature: sampling temperature; None leaves it to the endpoint. request: further fields of
        the request. timeout_seconds: time limit of the request.
    """

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        prompt: str,
        api_key: str = "",
        pattern: str | None = None,
        scale: Sequence[float] = (0.0, 10.0),
        temperature: float | None = 0.0,
        request: Mapping[str, Any] | None = None,
        timeout_seconds: float,
    ) -> None:
        self._url = _checked_url(base_url) + "/chat/completions"
        self._key, self._timeout = api_key, timeout_seconds
        self._prompt = _checked_text("prompt", prompt)
        self._fields = {"model": _checked_text("model", model), **(request or {})}
        if temperature is not None:
            self._fields["temperature"] = temperature
        self._pattern = None if pattern is None else _checked_pattern(pattern)
        if len(scale) != 2 or not scale[0] < scale[1]:
            raise ConfigError(f"scale is {list(scale)}: write [least, greatest]")
        self._low, self._high = scale

    reward_range = (0.0, 1.0)

    def __call__(self, episode: Mapping[str, Any]) -> float:
        """The score, between 0 and 1. Raises `JudgeFailed`."""
        content = _FIELD.sub(lambda found: _field(episode, found[1]), self._prompt)
        body = {**self._fields, "messages": [{"role": "user", "content": content}]}
        reply = _post(self._url, self._key, body, self._timeout)
        try:
            text = str(reply["choices"][0]["message"]["content"] or "")
        except (KeyError, IndexError, TypeError):
            raise JudgeFailed(f"{self._url} sent no chat completion: {reply!r:.{_SHOWN}}") from None
        said: str | None = text
        if self._pattern is not None:
            matches = [match[1] for match in self._pattern.finditer(text)]
            said = matches[-1] if matches else None
        score = None if said is None else read_score(said, self._low, self._high)
        if score is None:
            raise JudgeFailed(f"the judge gave no score that is certain: {text[-_SHOWN:]!r}")
        if not self._low <= score <= self._high:
            raise JudgeFailed(f"the judge gave {score:g}, which is not on the scale: {text!r:.300}")
        return (score - self._low) / (self._high - self._low)


class RewardModel:
    """A model with a scalar head that vLLM serves: `POST base_url/classify` with the conversation.

    base_url: URL of the server. model: the model's name there. api_key: bearer token, as a
        reference.
    index: index of the score, where the model gives several. activation: apply the model's own
        function (sigmoid or softmax), else take what the head gives. timeout_seconds: time limit of
        the request.
    """

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        api_key: str = "",
        index: int = 0,
        activation: bool = False,
        timeout_seconds: float,
    ) -> None:
        self._url = _checked_url(base_url) + "/classify"
        self._key, self._timeout, self._index = api_key, timeout_seconds, index
        self._fields = {"model": _checked_text("model", model), "use_activation": activation}

    def __call__(self, episode: Mapping[str, Any]) -> float:
        """The score. Raises `JudgeFailed`."""
        body = {**self._fields, "messages": episode["messages"]}
        reply = _post(self._url, self._key, body, self._timeout)
        try:
            return float(reply["data"][0]["probs"][self._index])
        except (KeyError, IndexError, TypeError, ValueError):
            raise JudgeFailed(f"{self._url} sent no score: {reply!r:.{_SHOWN}}") from None


def _checked_url(base_url: str) -> str:
    if not re.match(r"https?://", _checked_text("base_url", base_url)):
        raise ConfigError(f"base_url is {base_url!r}: begin it with http:// or https://")
    return base_url.rstrip("/")


def _checked_pattern(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(_checked_text("pattern", pattern))
    except re.error as error:
        raise ConfigError(f"pattern {pattern!r} is no regular expression: {error}") from None
    if compiled.groups < 1:
        raise ConfigError(f"pattern {pattern!r} has no group: put the score into (...)")
    return compiled


def _checked_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name} is {value!r}: write a text")
    return value


def _field(episode: Mapping[str, Any], name: str) -> str:
    """Return the text that replaces `{name}` in a prompt. Raises `JudgeFailed`."""
    messages = episode["messages"]
    if name == "conversation":
        return "\n\n".join(f"{each['role']}: {each['content']}" for each in messages)
    if name == "question":
        return str(messages[0]["content"])
    if name == "answer":
        answers = [each["content"] for each in messages if each["role"] == "assistant"]
        return str(answers[-1])
    value: Any = episode
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            known = sorted(value) if isinstance(value, Mapping) else type(value).__name__
            raise JudgeFailed(
                f"the judge's prompt has {{{name}}}, and the episode has no {part!r} there: it has "
                f"{known}; besides there are conversation, question and answer"
            )
        value = value[part]
    return value if isinstance(value, str) else json.dumps(value)


def _post(url: str, key: str, body: Mapping[str, Any], timeout_seconds: float) -> Any:
    """The JSON that is answered. Raises `JudgeFailed`."""
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with open_endpoint(request, timeout_seconds) as reply:
            return json.loads(read_reply(reply, timeout_seconds))
    except urllib.error.HTTPError as error:
        said = error.read(_SHOWN).decode(errors="replace")
        raise JudgeFailed(f"{url} answered with status {error.code}: {said}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise JudgeFailed(f"{url} gave no answer: {error}") from None
