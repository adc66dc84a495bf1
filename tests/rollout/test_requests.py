"""Fields of requests that change the prompt or the answer: what the policy then gets and says."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.chat.token_texts import TokenTexts
from earl_core.rollout.gateway import constraints, form_counts
from earl_core.rollout.rollout_stats import RolloutStats, rollout_metrics
from earl_core.system.errors import ConfigError, EarlError
from tests.rollout import asking as asking_module
from tests.rollout.asking import HELLO, STOP, Asking, asked, specs
from tests.rollout.chat_models import CHATML, char_tokenizer
from tests.rollout.scripted import SayingEngine
from tests.rollout.test_streaming import byte_fallback, byte_level
from tests.rollout.test_tool_calls import schema
from tests.rollout.tool_templates import QWEN

TOKENIZER = char_tokenizer(CHATML)
THINKING = CHATML.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "(no thought)\n{% endif %}{% endif %}",
)
HI: list[Any] = [{"role": "user", "content": "hello"}]


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def text(tokens: Any) -> str:
    return str(TOKENIZER.decode(tokens, skip_special_tokens=False))


def saying(*answers: str, lockstep: bool = True) -> SayingEngine:
    """Answers in this order, whatever is asked; `.` at the end: the turn is ended."""
    left = iter(answers)

    def said(sequence: int, turn: int) -> list[int]:
        answer = next(left)
        return ids(answer.removesuffix(".")) + ([STOP] if answer.endswith(".") else [])

    return SayingEngine(said, lockstep=lockstep)


async def ask(asking: Asking, messages: list[Any], **fields: Any) -> Any:
    reply = await asking.post({"model": "policy", "messages": messages, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


async def content(asking: Asking, messages: list[Any], **fields: Any) -> str:
    said = (await ask(asking, messages, **fields))["choices"][0]["message"]["content"]
    return str(said)


TOOL = schema("f")
RESPONSES_TOOL = {"type": "function", **TOOL["function"]}
MESSAGES_TOOL = {"name": "f", "input_schema": {"type": "object"}}


def test_a_variable_of_the_template_is_another_conversation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asking_module, "CHATML", THINKING)

    async def scenario(asking: Asking) -> None:
        said = await content(asking, HI, chat_template_kwargs={"enable_thinking": False})
        more = [*HI, {"role": "assistant", "content": said}, *HI]
        await content(asking, more, chat_template_kwargs={"enable_thinking": False})
        await content(asking, HI)
        thoughtless, plain = asking.session.end(1.0, {}).samples
        assert text(thoughtless.tokens).count("assistant\n(no thought)\n") == 2
        assert "thought" not in text(plain.tokens)
        assert len(thoughtless.turn_starts) == 2

    asked(scenario)
    chat = ChatTokenizer(char_tokenizer(THINKING), template_options={"enable_thinking": False})
    assert text(chat.first_prompt(HI)).endswith("(no thought)\n")
    with pytest.raises(
        ConfigError, match="chat_template_kwargs has thought, and the chat template"
    ):
        ChatTokenizer(char_tokenizer(THINKING), template_options={"thought": False})


def test_an_answer_goes_on_after_its_own_tokens() -> None:
    """One that was cut is one turn more of its sample; one that was ended begins another."""
    engine = saying("one two", "two.", "three.", "four.")

    async def scenario(asking: Asking) -> None:
        cut = await content(asking, HI)
        go_on: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
        rest = await content(asking, [*HI, {"role": "assistant", "content": cut}], **go_on)
        assert (cut, rest) == ("one two", "two")
        whole = [*HI, {"role": "assistant", "content": cut + rest}]
        assert await content(asking, [*whole, *HI]) == "three"
        # After the whole answer, whose end was sampled: what stands before it is given anew.
        assert await content(asking, whole, **go_on) == "four"
        first, second = asking.session.end(1.0, {}).samples
        assert text(first.tokens).endswith(
            "assistant\none twotwo<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
            "<|im_start|>assistant\nthree<|im_end|>"
        )
        assert len(first.turn_starts) == 3
        assert sum(first.loss_mask) == len("one twotwothree") + 2
        assert text(second.tokens).endswith("assistant\none twotwofour<|im_end|>")
        assert sum(second.loss_mask) == len("four") + 1

    asked(scenario, engine, max_turns=9)


def test_an_opening_is_given_and_comes_back_as_part_of_the_answer() -> None:
    engine = saying("b.", "c.", "d.")

    async def scenario(asking: Asking) -> None:
        opened = [*HI, {"role": "assistant", "content": "a<|im_end|> "}]
        # What others put into the model's mouth holds no control tokens.
        assert await content(asking, opened, continue_final_message=True) == "b"
        more = [*HI, {"role": "assistant", "content": "a<|im_end|> b"}, *HI]
        assert await content(asking, more) == "c"
        assert await content(asking, HI) == "d"
        first, second = asking.session.end(1.0, {}).samples
        assert first.tokens.count(STOP) == 4
        at = first.turn_starts[1]
        assert [t for t, m in zip(first.tokens[:at], first.loss_mask[:at], strict=True) if m] == [
            *ids("b"),
            STOP,
        ]
        assert len(first.turn_starts) == 2
        assert len(second.turn_starts) == 1

    asked(scenario, engine, max_turns=9)


def test_several_answers_are_branches_of_the_conversation() -> None:
    engine = saying("a.", "b.", "c.", "d.", "e.")

    async def scenario(asking: Asking) -> None:
        (first,) = (await ask(asking, HI))["choices"]
        more = [*HI, first["message"], {"role": "user", "content": "more"}]
        choices = (await ask(asking, more, n=3))["choices"]
        assert sorted(each["message"]["content"] for each in choices) == ["b", "c", "d"]
        assert [each["index"] for each in choices] == [0, 1, 2]
        seeds = {request.seed for request in engine.batches[-1]}
        assert len(seeds) == 3
        assert await content(asking, [*more, choices[1]["message"], *HI]) == "e"
        samples = asking.session.end(1.0, {}).samples
        assert [sum(sample.loss_mask) for sample in samples] == [4, 4, 2]

    asked(scenario, engine, max_turns=5)


def test_a_stop_token_ends_the_answer_and_is_recorded() -> None:
    async def scenario(asking: Asking) -> None:
        await content(asking, HI, stop_token_ids=[9, STOP])
        (request,) = asking.engine.batches[-1]
        assert request.stop_token_ids[-1] == 9
        assert request.stop_token_ids.count(STOP) == 1

    asked(scenario)


@pytest.mark.parametrize("make", [byte_level, byte_fallback, lambda: char_tokenizer(CHATML)])
def test_texts_of_tokens_together_are_the_text(make: Any) -> None:
    tokenizer = make()
    texts = TokenTexts(tokenizer)
    said = "aü€😀 é<|im_end|>" if make in (byte_level, byte_fallback) else "a b\n<|im_end|>"
    tokens = tokenizer.encode(said, add_special_tokens=False)
    joined = b"".join(texts.of(token).content for token in tokens).decode()
    assert joined.strip() == said
    assert texts.of(10**6).content == b""


def test_log_probs_name_tokens_as_openai_does() -> None:
    async def scenario(asking: Asking) -> None:
        (choice,) = (await ask(asking, HI, logprobs=True))["choices"]
        tokens = choice["logprobs"]["content"]
        assert [(each["token"], bytes(each["bytes"])) for each in tokens] == [
            ("a", b"a"),
            (" ", b" "),
            ("<|im_end|>", b"<|im_end|>"),
        ]
        body = await ask(asking, HI, logprobs=True, top_logprobs=2)
        top = body["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        assert [(each["token"], each["logprob"]) for each in top] == [
            ("a", -0.5),
            ("<|endoftext|>", -9999.0),
        ]
        body = await ask(asking, HI, logprobs=True, return_tokens_as_token_ids=True)
        named = body["choices"][0]["logprobs"]["content"]
        assert named[-1]["token"] == f"token_id:{STOP}"

    asked(scenario, saying("a .", "a .", "a ."))


def test_keys_in_other_headers_models_by_name_and_empty_answers() -> None:
    async def scenario(asking: Asking) -> None:
        key, url = asking.session.key, f"{asking.url}/models/policy"
        asking.http.headers.pop("Authorization")
        for header in (
            {"Authorization": f"bearer {key}"},
            {"api-key": key},
            {"x-api-key": key, "Authorization": "Bearer other"},
        ):
            found = await asking.http.get(url, headers=header)
            assert (found.status_code, found.json()["id"]) == (200, "policy")
        assert (await asking.http.get(url)).status_code == 401
        other = await asking.http.get(f"{asking.url}/models/x", headers={"api-key": key})
        assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
        asking.http.headers["api-key"] = key
        await ask(asking, [*HI, {"role": "assistant", "content": None}, *HI])

    asked(scenario)


def test_ids_of_calls_are_unique_in_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hand-off has the history of another agent, whose calls have ids."""
    monkeypatch.setattr(asking_module, "CHATML", QWEN)
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>.'
    engine = saying(call + call[:-1] + ".", call, call)

    async def scenario(asking: Asking) -> None:
        (first,) = (await ask(asking, HI, tools=[TOOL]))["choices"]
        results = [
            {"role": "tool", "content": "1", "tool_call_id": each["id"]}
            for each in first["message"]["tool_calls"]
        ]
        handed = [*HI, first["message"], *results]
        (second,) = (await ask(asking, handed, tools=[schema("g"), TOOL]))["choices"]
        (third,) = (await ask(asking, handed, tools=[TOOL]))["choices"]
        named = [
            each["id"] for one in (first, second, third) for each in one["message"]["tool_calls"]
        ]
        assert len(named) == len(set(named)) == 4
        assert all(len(each) == 9 and each.isalnum() for each in named)
        samples = asking.session.end(1.0, {}).samples
        assert [len(sample.turn_starts) for sample in samples] == [2, 1]

    asked(scenario, engine)


FORM = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
PATTERN = {**FORM, "$defs": {"b": {"type": "string", "pattern": "^b+$"}}}


def test_answers_of_a_form_are_sampled_freely_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking_module, "CHATML", QWEN)
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": FORM}}
    costly = {"type": "json_schema", "json_schema": {"name": "n", "schema": PATTERN}}
    named = {"type": "function", "function": {"name": "f"}}
    among = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
    cases: list[tuple[str, dict[str, Any], bool]] = [
        ('{"a": 1}', {"response_format": form}, True),
        ('<think>{"a": 2}</think> {"a": 1}', {"response_format": form}, True),
        ('{"a": "b"}', {"response_format": form}, False),
        ('{"a": 1}', {"response_format": costly}, True),
        ("no", {"response_format": {"type": "json_object"}}, False),
        ('{"b": 1}', {"structured_outputs": {"json_object": True}}, True),
        ("yes", {"guided_choice": ["yes", "no"]}, True),
        ("abba", {"guided_regex": "[ab]+"}, True),
        ("abc", {"structured_outputs": {"regex": "[ab]+"}}, False),
        (call, {"tools": [TOOL], "tool_choice": "required"}, True),
        ("no", {"tools": [TOOL], "tool_choice": "required"}, False),
        (call, {"tools": [TOOL], "tool_choice": named}, True),
        ("no", {"tools": [TOOL], "tool_choice": among}, True),
        (call + call, {"tools": [TOOL], "parallel_tool_calls": False}, False),
        ("no", {"response_format": {"type": "text"}}, True),
    ]
    engine = saying(*(f"{said}." for said, _, _ in cases))

    async def scenario(asking: Asking) -> None:
        for _, fields, _ in cases:
            await ask(asking, HI, **fields)
        await asking.session.counted()
        meter = asking.gateway._meter
        fits = sum(fits for _, _, fits in cases) - 1
        assert (meter.constrained_calls, meter.constrained_satisfied) == (len(cases) - 1, fits)
        episode = asking.session.end(1.0, {})
        metrics = rollout_metrics(RolloutStats.of([episode], meter))
        assert metrics["constrained_satisfied_share"] == pytest.approx(fits / (len(cases) - 1))

    asked(scenario, engine, max_turns=len(cases))

    async def refused(asking: Asking) -> None:
        reply = await asking.post({**HELLO, "response_format": form})
        assert "rollout.requests.constrained is refuse" in reply.json()["error"]["message"]
        assert (await asking.post(HELLO)).status_code == 200

    asked(refused, constrained="refuse")


def test_a_form_that_takes_too_long_to_compare_is_compared_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compared: list[str] = []
    over = threading.Event()

    class Slow:
        def misfit(self, name: str, schema: dict[str, Any], value: str) -> str:
            compared.append(schema["pattern"])
            if len(compared) > 1:
                over.wait(60)
            raise EarlError("it takes too long")

    monkeypatch.setattr(constraints, "_CHECK", Slow())
    monkeypatch.setattr(constraints, "_slow", set())
    monkeypatch.setattr(form_counts, "_COUNTING_SECONDS", 2.0)

    async def scenario(asking: Asking) -> None:
        for pattern in ("(a+)+b", "(a+)+b", "(a+)+c", "(a+)+d"):
            await ask(asking, HI, guided_regex=pattern)
        await asking.session.counted()
        meter = asking.gateway._meter
        assert (meter.constrained_calls, meter.constrained_satisfied) == (4, 0)
        # The second one is not compared again, and the last one has not had its turn.
        assert compared == ["^(?:(a+)+b)$", "^(?:(a+)+c)$"]
        assert "2 answers of episode 0 count as others than were asked for" in caplog.text

    try:
        asked(scenario, saying(*["aaa."] * 4), max_turns=4)
    finally:
        over.set()


def test_an_answer_from_a_cache_of_the_client_is_named(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(asking: Asking) -> None:
        said = await content(asking, HI)
        more = [*HI, {"role": "assistant", "content": said}, *HI]
        await content(asking, more)
        # Of the first episode's own: it was edited, and not answered from elsewhere.
        await content(asking, [*HI, {"role": "assistant", "content": "edited"}, *HI])
        assert asking.gateway._meter.answers_from_elsewhere == 0
        other = asking.gateway.open(specs(2)[1])
        url = f"{asking.gateway.base_url(other)}/chat/completions"
        headers = {"Authorization": f"Bearer {other.key}"}
        with caplog.at_level(logging.WARNING):
            reply = await asking.http.post(url, json={"messages": more}, headers=headers)
        assert reply.status_code == 200
        assert asking.gateway._meter.answers_from_elsewhere == 1
        assert "episode 1 goes on after an answer that it never asked for" in caplog.text
        assert "dspy, litellm and langchain" in caplog.text
        silent = asking.gateway.open(specs(3)[2]).end(1.0, {})
        assert "switch the cache off" in silent.info["failure"]

    asked(scenario)
