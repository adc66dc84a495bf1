"""Strings of several tokens that end an answer: recorded to their end, and cut off its text."""

from __future__ import annotations

import random
from typing import Any

import pytest

from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.chat.token_texts import TokenTexts
from earl_core.rollout.chat.turn_ends import StopStrings, cut
from tests.rollout import asking as asking_module
from tests.rollout.asking import Asking, asked
from tests.rollout.chat_models import CHATML, char_tokenizer
from tests.rollout.scripted import SayingEngine
from tests.rollout.test_other_apis import anthropic_client
from tests.rollout.test_requests import HI, TOOL, ask, content, ids, saying, text
from tests.rollout.test_streaming import Growing, byte_fallback, byte_level, streamed
from tests.rollout.tool_templates import QWEN

STOPS = ["Observation:", "Calling tools:"]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_they_are_found_at_the_token_that_completes_them(make: Any) -> None:
    """Against the text of all beginnings; characters and strings are divided among tokens."""
    tokenizer = make()
    texts = TokenTexts(tokenizer)
    found = 0
    for number in range(300):
        chance = random.Random(number)
        said = "".join(chance.choices("aü€😀 ", k=chance.randrange(1, 12)))
        tokens = tokenizer.encode(said, add_special_tokens=False)
        sought = ["".join(chance.choices("aü€😀 ", k=chance.randrange(1, 4))) for _ in range(2)]
        stops = StopStrings(sought, texts)
        beginnings = [
            b"".join(texts.of(each).content for each in tokens[: size + 1])
            for size in range(len(tokens))
        ]
        first = next(
            (
                size + 1
                for size, beginning in enumerate(beginnings)
                if any(each.encode() in beginning for each in sought)
            ),
            None,
        )
        assert stops(tokens, 0) == first
        seen = chance.randrange(len(tokens))
        if first is None or first > seen:
            assert stops(tokens, seen) == first
        found += first is not None
    assert found > 50


def test_the_text_is_cut_before_the_first() -> None:
    assert cut("a Observation: b", STOPS) == ("a ", "Observation:")
    assert cut("abab", ["b"], 2) == ("aba", "b")
    assert cut("ab", ["ab", "b"]) == ("", "ab")
    assert cut("abc", []) == ("abc", "")


def test_an_answer_ends_there_and_its_conversation_extends_the_sample() -> None:
    engine = saying("think Observation: it rains", "Calling", "over.", "new.", lockstep=False)

    async def scenario(asking: Asking) -> None:
        (choice,) = (await ask(asking, HI, stop=STOPS))["choices"]
        said = choice["message"]["content"]
        assert (said, choice["finish_reason"]) == ("think ", "stop")
        more = [*HI, {"role": "assistant", "content": said}, {"role": "user", "content": "5"}]
        # A string that did not come to its end is text.
        assert await content(asking, more, stop=STOPS) == "Calling"
        more += [{"role": "assistant", "content": "Calling"}, *HI]
        assert await content(asking, more) == "over"
        # What was cut off is no part of an answer that is gone on with.
        opened = [*HI, {"role": "assistant", "content": said}]
        assert await content(asking, opened, continue_final_message=True) == "new"
        first, second = asking.session.end(1.0, {}).samples
        assert "think Observation:<|im_end|>" in text(first.tokens)
        assert sum(first.loss_mask) == len(ids("think Observation:Callingover")) + 1
        assert len(first.turn_starts) == 3
        assert text(second.tokens).endswith("assistant\nthink new<|im_end|>")

    asked(scenario, engine)


def test_calls_before_it_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking_module, "CHATML", QWEN)
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\nObservation: 5'

    async def scenario(asking: Asking) -> None:
        (choice,) = (await ask(asking, HI, tools=[TOOL], stop=STOPS))["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert len(choice["message"]["tool_calls"]) == 1
        reply = await anthropic_client(asking).messages.create(
            model="policy", max_tokens=99, messages=HI, stop_sequences=STOPS
        )
        assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "Calling tools:")
        assert reply.content[0].text == "I am "  # type: ignore[union-attr]

    asked(scenario, saying(call, "I am Calling tools: x"))


class GrowingSaying(Growing, SayingEngine):
    """Says one thing, token by token."""


def test_no_piece_of_a_stream_holds_a_part_of_it() -> None:
    engine = GrowingSaying(lambda sequence, turn: ids("one two aaaab and"), lockstep=False)
    engine.slow = 0.04

    async def scenario(asking: Asking) -> None:
        chunks = await streamed(asking, {"messages": HI, "stop": ["aab"]})
        deltas = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
        pieces = [delta for delta in deltas if delta]
        assert "".join(pieces) == "one two aa"
        assert len(pieces) > 2

    asked(scenario, engine, max_turns=1)


def test_those_of_a_run_stay_in_the_text() -> None:
    """As those of one token do: environments may want to see them."""
    chat = ChatTokenizer(char_tokenizer(CHATML), stop=("</answer>", "!"))
    assert chat.stop_token_ids[-1] == ids("!")[0]
    assert chat.ends is not None
    tokens = ids("<answer>5</answer> and")
    assert chat.ends(tokens, 0) == len("<answer>5</answer>")
    assert chat.text_of(tokens[:18]) == "<answer>5</answer>"
