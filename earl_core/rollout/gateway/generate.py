"""Token ids in, token ids out, as vLLM's `/inference/v1/generate` has it: for clients that render
conversations themselves, such as verifiers' training client.

Sampling is the run's, as in `chat_completions`.
https://docs.vllm.ai/en/latest/serving/openai_compatible_server
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from earl_core.rollout.gateway import chat_completions
from earl_core.rollout.gateway.call import Answer
from earl_core.rollout.gateway.chat_request import (
    json_object,
    stop_strings,
    token_ids,
    whole_number,
)
from earl_core.rollout.gateway.fields import GENERATE, SAMPLING, check
from earl_core.rollout.gateway.refusals import invalid


@dataclass(frozen=True)
class GenerateRequest:
    """The parts of a request that count. logprobs: whether the reply has them."""

    model: str
    token_ids: list[int]
    max_tokens: int | None
    logprobs: bool
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


def parse(body: Any, vocabulary: int) -> GenerateRequest:
    """Raises `HTTPException` with the field that is wrong. vocabulary: how many tokens the
    policy may sample."""
    body = json_object(body)
    check(body, GENERATE)
    ids = body.get("token_ids")
    if not isinstance(ids, list) or not ids:
        raise invalid("token_ids must be a list of at least one token's id")
    if not all(type(each) is int and 0 <= each < vocabulary for each in ids):
        raise invalid(f"token_ids must be whole numbers from 0 to {vocabulary - 1}")
    sampling = body.get("sampling_params") or {}
    if not isinstance(sampling, Mapping):
        raise invalid("sampling_params must be a JSON object")
    check(sampling, SAMPLING, "sampling_params.")
    return GenerateRequest(
        str(body.get("model", "")),
        ids,
        whole_number(sampling, "max_tokens", 1),
        sampling.get("logprobs") is not None,
        token_ids(sampling, "stop_token_ids", vocabulary),
        stop_strings(sampling, "stop"),
    )


def reply(request: GenerateRequest, answer: Answer, name: str) -> dict[str, Any]:
    """The body of the reply."""
    choice = {
        "index": 0,
        "token_ids": answer.completion.tokens,
        "spans": chat_completions.spans(answer),
        "finish_reason": answer.finish_reason,
        "logprobs": chat_completions.logprobs(answer) if request.logprobs else None,
    }
    return {"request_id": name, "choices": [choice]}
