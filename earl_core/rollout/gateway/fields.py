"""The fields of requests, by API: those that are done, those that are refused, and those that
change neither the prompt nor the answer.

Nothing that changes these is ignored: a field that stands in no table is refused by its name.
`docs/reference/requests.md` is written from these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from earl_core.rollout.gateway.refusals import invalid

NOTHING: tuple[Any, ...] = (None, False, "", [], {})
"""Values that ask for nothing, unless a field says others."""


class Field(NamedTuple):
    """nothing: values of a refused field that ask for nothing."""

    verdict: Literal["done", "refused", "harmless"]
    why: str
    nothing: tuple[Any, ...] = NOTHING


Fields = Mapping[str, Field]


def check(body: Mapping[str, Any], fields: Fields, where: str = "") -> None:
    """Raise `HTTPException` for a field that is refused or unknown. where: in front of its name."""
    for key, value in body.items():
        field = fields.get(key)
        if field is None and value is not None:
            raise invalid(
                f"{where}{key} is unknown here, and nothing that may change an answer is ignored: "
                "leave it out (docs/reference/requests.md lists all fields)"
            )
        if field is not None and field.verdict == "refused" and value not in field.nothing:
            raise invalid(f"{where}{key} is not supported: {field.why}")


def _done(why: str, *names: str) -> dict[str, Field]:
    return {name: Field("done", why) for name in names}


def _refused(why: str, *names: str, **nothing: Any) -> dict[str, Field]:
    """nothing: fields by name, each with the one value that asks for nothing."""
    alone = {name: Field("refused", why, (None, value)) for name, value in nothing.items()}
    return {name: Field("refused", why) for name in names} | alone


def _harmless(why: str, *names: str) -> dict[str, Field]:
    return {name: Field("harmless", why) for name in names}


_THE_RUNS = "sampling is the run's: `rollout.temperature`, seeded by episode, conversation and call"
_OWN = "answers are sampled from the policy as it is"
_FREE = "masked, sampled freely and counted, or refused (`rollout.requests.constrained`)"
_THOUGHT = "it is in the answer's text, but of one masked to a form (`reasoning_content`)"
_NO_MEDIA = "prompts and answers are text"
_NOT_SERVED = "there is no such service here"

_SAMPLING = {
    **_harmless(_THE_RUNS, "temperature", "top_p", "top_k", "min_p", "seed"),
    **_harmless(_THE_RUNS, "presence_penalty", "frequency_penalty", "repetition_penalty"),
    **_harmless("only beam search has it", "length_penalty", "early_stopping"),
    **_done("answers of the conversation, each on a branch of its own", "n"),
    **_done("tokens that end the answer, besides the model's own", "stop_token_ids"),
    **_done("strings that end the answer, whose text is cut before them", "stop"),
    **_refused(_OWN, "logit_bias", "bad_words", "allowed_token_ids", "vllm_xargs", "extra_args"),
    **_refused(_OWN, "min_tokens", "ignore_eos", "use_beam_search", "thinking_token_budget"),
    **_refused(_OWN, "repetition_detection", "watermarking"),
    **_refused("every answer is the policy's, none is chosen among several", best_of=1),
    **_refused("only sampled tokens have log-probs", "prompt_logprobs", "logprob_token_ids"),
    **_refused("only sampled tokens have log-probs", prompt_logprobs=0),
    **_refused("a text ends before the token that ended its turn", "include_stop_str_in_output"),
    **_refused("control tokens are left out of texts: ask for token ids", skip_special_tokens=True),
    **_harmless(
        "how tokens are joined to texts is the tokenizer's", "spaces_between_special_tokens"
    ),
    **_refused("a conversation is answered whole or not at all", "truncate_prompt_tokens"),
    **_harmless("nothing is truncated", "truncation_side"),
    **_refused("routing is recorded with the episode", "routed_experts_prompt_start"),
    **_harmless("how often pieces come is the gateway's", "stream_interval"),
}
"""Fields that vLLM's chat completions and its sampling parameters have in common."""

_PROMPTS = {
    **_done(
        "variables of the chat template, before `rollout.chat_template_kwargs`",
        "chat_template_kwargs",
    ),
    **_done("the answer goes on with the last message (prefill)", "continue_final_message"),
    **_done("false only with `continue_final_message`", "add_generation_prompt"),
    **_done("a variable of the chat template that reads it, else refused", "reasoning_effort"),
    **_refused("the template is the run's: set model.chat_template", "chat_template", "documents"),
    **_refused("the chat template writes them", "add_special_tokens"),
    **_refused("the answer alone comes back", "echo", "return_prompt_text", "return_token_offsets"),
    **_refused(_THOUGHT, include_reasoning=True),
    **_refused(_NO_MEDIA, "mm_processor_kwargs", "media_io_kwargs", "mm_payload"),
    **_refused(_NO_MEDIA, "return_mm_kwargs"),
    **_refused("keys and values stay in the engine", "kv_transfer_params", "ec_transfer_params"),
}

_LABELS = _harmless(
    "it neither changes the prompt nor the answer",
    *("user", "metadata", "store", "service_tier", "safety_identifier", "priority", "request_id"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_salt"),
    *("session_id", "prediction"),
)

CHAT: Fields = {
    **_SAMPLING,
    **_PROMPTS,
    **_LABELS,
    **_done(
        "roles system, developer, user, assistant, tool; texts, calls and reasoning; a message "
        "with `function_call`, `audio`, `refusal`, `prefix`, `partial`, `thinking`, "
        "`thinking_blocks` or `reasoning_details` is refused",
        "messages",
    ),
    **_done("`opponent`: recorded nowhere; any other: the policy", "model"),
    **_done("the answer's budget, beside that of the run", "max_completion_tokens", "max_tokens"),
    **_done("functions that the model may call", "tools"),
    **_done(f"auto and none; required, a name, allowed_tools: {_FREE}", "tool_choice"),
    **_done(f"text; json_object and json_schema: {_FREE}", "response_format"),
    **_done(f"false: {_FREE}", "parallel_tool_calls"),
    **_done(f"json, json_object, choice, regex: {_FREE}; others are refused", "structured_outputs"),
    **_done(_FREE, "guided_json", "guided_choice", "guided_regex"),
    **_refused("ask for a JSON schema, a choice or a regular expression", "guided_grammar"),
    **_refused("a schema says where white space may stand", "guided_whitespace_pattern"),
    **_harmless("xgrammar masks, or nothing does", "guided_decoding_backend"),
    **_done("server-sent events", "stream"),
    **_done("`include_usage`", "stream_options"),
    **_done("of the sampled tokens", "logprobs"),
    **_done("0 to 20 of the most likely tokens, with `logprobs`", "top_logprobs"),
    **_done("ids of prompt and answer, and the policy versions of the latter", "return_token_ids"),
    **_done("texts of tokens in `logprobs` are `token_id:ID`", "return_tokens_as_token_ids"),
    **_refused("it is the older form of tools: name tools", "functions"),
    "function_call": Field(
        "refused", "it is the older form of tool_choice", (None, "auto", "none")
    ),
    **_refused(_NO_MEDIA, "audio"),
    "modalities": Field("refused", _NO_MEDIA, (None, [], ["text"])),
    **_refused("ask for it in a message", verbosity="medium"),
    **_refused(_NOT_SERVED, "web_search_options", "moderation"),
}
"""OpenAI's chat completions, and what vLLM adds to them."""

GENERATE: Fields = {
    **_LABELS,
    **_done("the whole prompt", "token_ids"),
    **_done("see below", "sampling_params"),
    **_done("`opponent`: recorded nowhere; any other: the policy", "model"),
    **_refused("the answer comes in one piece", "stream"),
    **_harmless("nothing is streamed", "stream_options"),
    **_refused(_NO_MEDIA, "features", "content_parts", "return_mm_kwargs"),
    **_harmless("the tokens are the prompt", "token_offsets"),
    **_refused("keys and values stay in the engine", "kv_transfer_params", "ec_transfer_params"),
    **_refused("the answer is token ids", output_mode="tokens"),
}
"""vLLM's `/inference/v1/generate`."""

SAMPLING: Fields = {
    **_SAMPLING,
    **_refused("ask several times", n=1),
    **_done("the answer's budget, beside that of the run", "max_tokens"),
    "logprobs": Field("done", "0 or more: those of the sampled tokens"),
    **_refused("answers are not constrained", "structured_outputs"),
    **_harmless("the answer is token ids", "detokenize", "flat_logprobs", "output_kind"),
    **_harmless("the answer is token ids", "skip_clone", "output_text_buffer_length"),
    **_harmless("the engine's cache is its own", "skip_reading_prefix_cache"),
    **_refused("only sampled tokens have log-probs", "prompt_logprob_token_ids"),
    **_refused("only sampled tokens have log-probs", "prompt_logprob_start"),
    **_refused(_OWN, "trace_decode_token_ids"),
}
"""Its `sampling_params`."""

RESPONSES: Fields = {
    **_LABELS,
    **_harmless(_THE_RUNS, "temperature", "top_p"),
    **_done("a text, or messages, reasoning, calls and their results", "input"),
    **_done("a message of the system in front; of this request alone", "instructions"),
    **_done("the conversation after that answer goes on, as a branch", "previous_response_id"),
    **_done("`opponent`: recorded nowhere; any other: the policy", "model"),
    **_done("the answer's budget, beside that of the run", "max_output_tokens"),
    **_done("functions that the model may call; tools of others are refused", "tools"),
    **_done(f"auto and none; required, a name, allowed_tools: {_FREE}", "tool_choice"),
    **_done(f"false: {_FREE}", "parallel_tool_calls"),
    **_done(f"format text; json_object and json_schema: {_FREE}", "text"),
    **_done("effort: a variable of the chat template that reads it, else refused", "reasoning"),
    **_done("server-sent events", "stream"),
    **_harmless("events carry no padding", "stream_options"),
    "include": Field(
        "refused",
        "answers have no such part",
        (None, [], ["reasoning.encrypted_content"]),
    ),
    **_refused("log-probs come with chat completions", top_logprobs=0),
    **_refused("a conversation is answered whole or not at all", truncation="disabled"),
    **_refused("an answer is waited for", "background", "background_options"),
    **_refused("name previous_response_id", "conversation"),
    **_refused(_NOT_SERVED, "prompt", "moderation", "access_programs", "context_management"),
    **_refused("only functions of the caller are called", "max_tool_calls"),
    **_refused(_NO_MEDIA, "image"),
}
"""OpenAI's Responses."""

MESSAGES: Fields = {
    **_harmless(_THE_RUNS, "temperature", "top_p", "top_k"),
    **_harmless("it neither changes the prompt nor the answer", "metadata", "service_tier"),
    **_harmless("it neither changes the prompt nor the answer", "cache_control", "inference_geo"),
    **_harmless("it neither changes the prompt nor the answer", "user_profile_id", "workspace_id"),
    **_harmless("it neither changes the prompt nor the answer", "diagnostics", "speed", "betas"),
    **_done(
        "texts, thinking, calls and their results; a last one of the assistant's is gone on with",
        "messages",
    ),
    **_done("a message of the system in front", "system"),
    **_done("`opponent`: recorded nowhere; any other: the policy", "model"),
    **_done("the answer's budget, beside that of the run", "max_tokens"),
    **_done("functions that the model may call; tools of others are refused", "tools"),
    **_done(f"auto and none; any, a name, disable_parallel_tool_use: {_FREE}", "tool_choice"),
    **_done("`enable_thinking` of a chat template that reads it", "thinking"),
    **_done(f"format: {_FREE}; effort: of a chat template that reads it", "output_config"),
    **_done("server-sent events", "stream"),
    **_done("strings that end the answer, whose text is cut before them", "stop_sequences"),
    **_refused("the conversation is the request's", "context_management"),
    **_refused(_NOT_SERVED, "container", "mcp_servers"),
}
"""Anthropic's Messages."""

APIS: Mapping[str, tuple[str, Fields]] = {
    "chat completions": ("POST /v1/chat/completions", CHAT),
    "Responses": ("POST /v1/responses", RESPONSES),
    "Messages": ("POST /v1/messages", MESSAGES),
    "generate": ("POST /inference/v1/generate", GENERATE),
    "sampling_params of generate": ("", SAMPLING),
}
"""All tables, by the name of the API; the path of each."""
