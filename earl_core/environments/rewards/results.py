"""Checks of what environments return, so that a wrong result costs its own episode only."""

from __future__ import annotations

import json
from typing import Any

from earl_core.environments.base import OPPONENT_REWARD, StepResult
from earl_core.environments.real_numbers import checked_number
from earl_core.system.frames import WireError

ROLES = ("system", "user", "assistant", "tool")


def first_messages(messages: Any) -> dict[str, Any]:
    """Write the return value of `reset` as JSON: `messages`. Raises WireError."""
    if not _checked_messages(messages):
        raise WireError(
            "reset() must return at least one message, for the agent has nothing to answer yet."
        )
    return _as_json({"messages": messages})


def step_result(result: Any) -> dict[str, Any]:
    """Write the return value of `step` as JSON: the fields of `StepResult`. Raises WireError."""
    if not isinstance(result, StepResult):
        raise WireError(f"step() must return a StepResult, not {type(result).__name__}.")
    reward = checked_number("The reward", result.reward)
    info = _checked_info(result.info)
    messages = _checked_messages(result.messages)
    if not result.done and not messages:
        raise WireError("A step that does not end the episode must return a message.")
    done = bool(result.done)
    return _as_json({"messages": messages, "reward": reward, "done": done, "info": info})


def legal_answers(answers: Any) -> dict[str, Any]:
    """Write the return value of `legal_answers` as JSON: `answers`. Raises WireError."""
    if not isinstance(answers, (list, tuple)) or not all(isinstance(x, str) for x in answers):
        raise WireError(f"legal_answers() must return a list of texts, not {answers!r:.200}.")
    for answer in answers:
        _check_text("A legal answer", answer)
    return {"answers": list(answers)}


def _as_json(value: dict[str, Any]) -> dict[str, Any]:
    """Return the value as the pool will see it: with lists for tuples and texts for all keys."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(
            f"StepResult.info must hold only what JSON can (no NaN, no arrays): {error}."
        ) from error
    return plain


def _checked_messages(messages: Any) -> Any:
    if not isinstance(messages, (list, tuple)):
        raise WireError(f"Messages must be a list, not {type(messages).__name__}.")
    for message in messages:
        if not (
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
        ):
            raise WireError(
                f"A message must be a dict with the texts role and content, not {message!r:.200}."
            )
        if message["role"] not in ROLES:
            raise WireError(
                f"A message's role must be one of {', '.join(ROLES)}, not {message['role']!r:.50}."
            )
        calls = message.get("tool_calls", [])
        if not isinstance(calls, list) or not all(map(_is_call, calls)):
            raise WireError(
                "A message's tool_calls must be a list of calls with the text function.name and "
                f"the dict function.arguments, not {calls!r:.200}."
            )
        _check_text("A message's content", message["content"])
    return messages


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), dict)
    )


def _checked_info(info: Any) -> dict[str, Any]:
    if not isinstance(info, dict):
        raise WireError(f"info must be a dict, not {type(info).__name__}.")
    if isinstance(info.get("outcome"), str):
        _check_text('info["outcome"]', info["outcome"])
    _check_outcomes(info.get("outcomes", ()))
    if OPPONENT_REWARD in info:
        value = info[OPPONENT_REWARD]
        info = {**info, OPPONENT_REWARD: checked_number('info["opponent_reward"]', value)}
    if "metrics" not in info:
        return info
    metrics = info["metrics"]
    if not isinstance(metrics, dict) or not all(isinstance(name, str) for name in metrics):
        raise WireError(f'info["metrics"] must be a dict of numbers by name, not {metrics!r:.200}.')
    for name in metrics:
        _check_text('A name in info["metrics"]', name)
    numbers = {n: checked_number(f'info["metrics"][{n!r}]', v) for n, v in metrics.items()}
    return {**info, "metrics": numbers}


def _check_outcomes(outcomes: Any) -> None:
    if not isinstance(outcomes, (list, tuple)) or not all(isinstance(x, str) for x in outcomes):
        raise WireError(f'info["outcomes"] must be a list of texts, not {outcomes!r:.200}.')
    for outcome in outcomes:
        _check_text('One of info["outcomes"]', outcome)


def _check_text(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise WireError(
            f"{what} cannot be encoded as UTF-8 ({error.reason} at character {error.start}): read "
            'its source as UTF-8, or pass it through text.encode("utf-8", "replace").decode().'
        ) from None
