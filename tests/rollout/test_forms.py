"""Answers of a form that the engine masks: from the request to the trainer's log-probs."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.exceptions import HTTPException

from earl_core.config.rollout import RolloutConfig
from earl_core.dispatch import Batch, Manifest, ShardStore
from earl_core.learner.data import masks as masks_module
from earl_core.learner.data.masks import masks_of
from earl_core.learner.data.samples import training_samples
from earl_core.pretrained import grammars as grammars_module
from earl_core.pretrained.grammars import GrammarError, Grammars, check_library, grammars_of
from earl_core.rollout.chat.call_grammars import CALL_FORMS, check_call_form
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.chat.tool_calls import NO_TOOLS, Tools
from earl_core.rollout.engines.engine import Completion, GenerationRequest
from earl_core.rollout.gateway import constraints
from earl_core.rollout.gateway.forms import Forms
from earl_core.system.errors import ConfigError
from earl_core.trajectory.forms import Form, dump_forms, load_forms
from earl_core.trajectory.samples import Episode, rollout_rows
from earl_core.trajectory.schema import ROLLOUT_SCHEMA
from tests.learner.test_policy_learner import TEMPERATURE, make_learner
from tests.rollout import asking as asking_module
from tests.rollout.asking import Asking, asked, limits, on_torch
from tests.rollout.chat_models import CHATML, char_tokenizer, tiny_model
from tests.rollout.test_requests import HI, ask, saying

COLOURS: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": COLOURS}} for name in ("f", "g")
]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "c", "schema": COLOURS}}
ROOMY: dict[str, Any] = {
    "max_tokens_per_turn": 300,
    "temperature": TEMPERATURE,
    "constrained": "engine",
    "max_turns": 40,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), positions=2048)


def called(reply: Any) -> list[tuple[str, Any]]:
    calls = reply["choices"][0]["message"].get("tool_calls", [])
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


async def _asks(asking: Asking) -> Episode:
    """What frameworks send, one after the other."""
    given: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": False}
    (call,) = called(await ask(asking, HI, **given, tool_choice="required"))
    assert call[0] in ("f", "g")
    assert call[1]["colour"] in ("red", "blue")
    name = {"type": "function", "function": {"name": "g"}}
    assert called(await ask(asking, HI, **given, tool_choice=name))[0][0] == "g"
    said = (await ask(asking, HI, response_format=SCHEMA))["choices"][0]["message"]["content"]
    assert json.loads(said)["colour"] in ("red", "blue")
    both = await ask(asking, HI, tools=TOOLS, response_format=SCHEMA)
    message = both["choices"][0]["message"]
    assert called(both) or json.loads(message["content"])["colour"] in ("red", "blue")
    said = await ask(asking, HI, structured_outputs={"choice": ["left", "right"]})
    assert said["choices"][0]["message"]["content"] in ("left", "right")
    said = await ask(asking, HI, guided_regex="[ab]{3}[0-9]")
    assert len(said["choices"][0]["message"]["content"]) == 4
    # A free turn in the same sample as one of a form.
    messages = [*HI, {"role": "assistant", "content": message["content"]}, *HI]
    await ask(asking, messages, max_tokens=4)
    assert asking.session._meter.constrained_calls == 6
    await asking.session.counted()
    assert asking.session._meter.constrained_satisfied == 6
    return asking.session.end(1.0, {})


def _assert_refused(batch: Batch, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks that take too long, and those of another release."""
    with monkeypatch.context() as patch:
        patch.setattr(grammars_module, "_REPEATED_SECONDS", 0.0)
        patch.setattr(grammars_module, "_TOKEN_SECONDS", 0.0)
        with pytest.raises(GrammarError, match="episode 0: its masks take over 0 s"):
            masks_of(batch, make)
    with monkeypatch.context() as patch:
        patch.setattr(masks_module, "release", lambda: "0.0.1")
        with pytest.raises(GrammarError, match=r"masked with xgrammar .* the trainer has 0\.0\.1"):
            masks_of(batch, make)


def test_the_trainer_has_the_log_probs_that_the_engine_sampled_at(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through shards, as a run does; and other ones without the forms."""
    grammars = partial(grammars_of, model, False)

    async def run(engine: Any) -> Episode:
        async with Asking(engine, limits(**ROOMY, grammars=grammars)) as asking:
            return await _asks(asking)

    episode = asyncio.run(on_torch(model, run))
    assert sum(form is not None for sample in episode.samples for form in sample.forms) == 6
    learner = make_learner(model)
    store = ShardStore(tmp_path, 2**26)
    for held in (True, False):
        if not held:
            for sample in episode.samples:
                sample.forms = [None] * len(sample.forms)
        entry = store.publish(
            stage="rollout", iteration=0, rank=0, schema=ROLLOUT_SCHEMA,
            rows=rollout_rows([episode]),
        )  # fmt: skip
        manifest = Manifest(
            run="", iteration=0, stage="rollout", key="", policy_version=0, shards=(entry,)
        )
        with Batch(store, [manifest]) as batch:
            if held:
                _assert_refused(batch, grammars, monkeypatch)
            samples = training_samples(batch, masks_of(batch, grammars))
            found = np.concatenate(learner.score(samples))
            recorded = np.concatenate([each.rollout_logprobs for each in samples])
            assert (np.abs(found - recorded).max() < 1e-4) == held
            if held:
                trained = np.concatenate([each.loss_mask for each in samples]) == 1
                # Of what alone is allowed.
                assert (np.abs(found[trained]) < 1e-6).mean() > 0.3
            del samples
    store.remove()


@pytest.mark.parametrize("form", sorted(CALL_FORMS.keys() - {"deepseek"}))
def test_calls_that_a_grammar_writes_are_read_as_such(
    model: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call, and as many as the model likes."""
    monkeypatch.setattr(asking_module, "ChatTokenizer", partial(ChatTokenizer, tool_format=form))
    monkeypatch.setattr(asking_module, "ROWS", 0)

    async def run(engine: Any) -> None:
        settings = limits(**ROOMY, grammars=partial(grammars_of, model, False))
        async with Asking(engine, settings) as asking:
            for number in range(3):
                given = {"tools": TOOLS, "parallel_tool_calls": number == 0}
                reply = await ask(asking, HI, **given, tool_choice="required")
                if reply["choices"][0]["finish_reason"] == "length":
                    continue
                calls = called(reply)
                assert calls
                assert all(name in ("f", "g") for name, _ in calls)
                # A space around a value of XML is part of it.
                assert all(each["colour"].strip() in ("red", "blue") for _, each in calls)
                assert len(calls) == 1 or number == 0

    asyncio.run(on_torch(model, run))


REFUSED = {
    "it has no grammar: .*(?i:look)": {"guided_regex": r"(?=a)a"},
    "'uniqueItems' in a schema has no grammar": {"guided_json": {"uniqueItems": True}},
    "no token of the vocabulary goes on": {
        "guided_json": {
            "properties": {"a": {"type": "string", "pattern": r"a[^\d\D]b"}},
            "required": ["a"],
        }
    },
    r"takes too long \(": {"guided_regex": "((a{1,50}){1,50}){1,50}"},
    "'allOf' of several": {"guided_json": {"allOf": [{"type": "object"}, {}]}},
    "'type' beside 'anyOf'": {"guided_json": {"type": "object", "anyOf": [{"type": "integer"}]}},
    "'minLength' beside '.ref'": {
        "guided_json": {"$defs": {"a": {"type": "string"}}, "$ref": "#/$defs/a", "minLength": 5}
    },
    "refers to what is not in the schema": {"guided_json": {"$ref": "http://localhost/a"}},
    "'pattern' beside 'maxLength'": {
        "guided_json": {"type": "string", "pattern": "a+", "maxLength": 2}
    },
    "'minimum' without 'type'": {"guided_json": {"items": {"minimum": 2}}},
    "'required' without 'properties'": {"guided_json": {"type": "object", "required": ["a"]}},
    "the format 'iri'": {"guided_json": {"items": {"type": "string", "format": "iri"}}},
    "over 64 levels deep": {"guided_json": json.loads('{"anyOf": [' * 60 + "{}" + "]}" * 60)},
    "over 131,072 characters": {"guided_choice": ["x" * 2**18]},
    "each ask for a form of the text": {"guided_regex": "a", "guided_choice": ["a"]},
    "no token of the vocabulary": {"guided_choice": ["ä"]},
    "a message that has begun": {
        "messages": [*HI, {"role": "assistant", "content": "a"}],
        "continue_final_message": True,
        "guided_choice": ["ab"],
    },
}


def test_what_cannot_be_masked_is_refused_with_its_reason() -> None:
    grammars = Grammars(char_tokenizer(CHATML), asking_module.ROWS)

    async def scenario(asking: Asking) -> None:
        for told, fields in REFUSED.items():
            reply = await asking.post({"model": "x", "messages": HI, **fields})
            assert reply.status_code == 400, told
            assert re.search(told, reply.json()["error"]["message"]), reply.text
        # None of them has been.
        await ask(asking, HI)
        assert len(asking.session.end(1.0, {}).samples) == 1

    asked(
        scenario, saying("a.", lockstep=False), constrained="engine", grammars=lambda: grammars,
        max_turns=1,
    )  # fmt: skip


def test_an_answer_at_a_dead_end_is_refused_and_the_episode_goes_on() -> None:
    engine = saying("a", "a.", lockstep=False)
    answer_of = engine._answer

    def answer(request: GenerationRequest) -> Completion:
        answered = answer_of(request)
        ended = answered.tokens[-1] == asking_module.STOP
        return answered if ended else replace(answered, finish_reason="dead_end")

    engine._answer = answer  # type: ignore[method-assign]

    async def scenario(asking: Asking) -> None:
        reply = await asking.post({"model": "x", "messages": HI})
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "dead_end")
        await ask(asking, HI)
        (sample,) = asking.session.end(1.0, {}).samples
        assert sample.texts == ["hello", "a"]

    asked(scenario, engine, max_turns=1)


def test_reasoning_comes_before_the_form() -> None:
    """Where the template knows it: it may be there, or it has begun, or it is over."""
    template = CHATML + "{# <think> #}"
    chat = ChatTokenizer(char_tokenizer(template))
    grammars = Grammars(char_tokenizer(CHATML), 128)
    forms = Forms(chat, lambda: grammars)
    stops = (3,)

    def accepts(prompt: str, text: str) -> bool:
        asks = [constraints.of_choice("choice", ["yes"])]
        form = asyncio.run(forms.of(asks, NO_TOOLS, chat.encode(prompt), stops))
        try:
            grammars.matcher(form, [*chat.encode(text), 3])
        except GrammarError:
            return False
        return True

    assert accepts("hello", "yes")
    assert accepts("hello", "<think>no</think>\n\nyes")
    assert accepts("hello <think>\n", "no</think>yes")
    assert not accepts("hello <think>\n", "yes")
    assert accepts("<think>\n\n</think>\n\n", "yes")
    assert not accepts("<think>\n\n</think>\n\n", "<think></think>yes")


def test_text_of_a_form_comes_back_without_the_reasoning_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And is known again without it; it is recorded with it."""
    chat = ChatTokenizer(char_tokenizer(CHATML + "{# <think> #}"), rows=asking_module.ROWS)
    monkeypatch.setattr(asking_module, "ChatTokenizer", lambda *_, **__: chat)
    grammars = Grammars(char_tokenizer(CHATML), asking_module.ROWS)
    answer = "<think>\nwell\n</think>\n\n"

    async def scenario(asking: Asking) -> None:
        choice = {"guided_choice": ["yes", "no"]}
        message = (await ask(asking, HI, **choice))["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("yes", "well")
        reply = await asking.post(
            {"model": "x", "messages": [*HI, message, *HI], "stream": True, **choice}
        )
        lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n")[:-2]]
        deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
        assert "".join(each.get("content", "") for each in deltas) == "no"
        assert [each["reasoning_content"] for each in deltas if "reasoning_content" in each] == [
            "well"
        ]
        (sample,) = asking.session.end(1.0, {}).samples
        assert sample.texts == ["hello", f"{answer}yes", "hello", f"{answer}no"]

    asked(
        scenario, saying(f"{answer}yes.", f"{answer}no.", lockstep=False), constrained="engine",
        grammars=lambda: grammars, max_tokens_per_turn=99,
    )  # fmt: skip


def test_a_model_whose_calls_have_no_grammar_is_told() -> None:
    """Before the engine starts, and where a request comes all the same."""
    tokenizer = char_tokenizer(CHATML + "{% if tools %}{{ tools }}{% endif %}")
    check_call_form(ChatTokenizer(char_tokenizer(CHATML), tool_format="gemma4"))
    check_call_form(ChatTokenizer(tokenizer, tool_format="hermes"))
    with pytest.raises(ConfigError, match="calls of the format gemma4 have no grammar"):
        check_call_form(ChatTokenizer(tokenizer, tool_format="gemma4"))
    unknown = ChatTokenizer(tokenizer)
    with pytest.raises(ConfigError, match="not in a form that is known"):
        check_call_form(unknown)
    forms = Forms(unknown, lambda: Grammars(tokenizer, 128))
    asks = [constraints.calls("tool_choice")]
    with pytest.raises(HTTPException, match="not in a form that is known") as error:
        asyncio.run(forms.of(asks, Tools(TOOLS), [], (3,)))
    assert error.value.status_code == 400


def test_forms_of_turns_are_written_once_and_read_back() -> None:
    one, other = Form("a", (1, 2)), Form("b", (3,))
    forms = [None, one, other, one, None]
    assert load_forms(dump_forms(forms)) == forms
    assert dump_forms(forms).count('"a"') == 1
    assert dump_forms([None, None]) == ""
    assert load_forms("") == []


def test_a_prefix_of_answers_and_masks_exclude_each_other() -> None:
    sizes: dict[str, Any] = {"prompts_per_iteration": 1, "group_size": 2, "max_turns": 1}
    with pytest.raises(ValueError, match="leave one of them out"):
        RolloutConfig(**sizes, requests={"constrained": "engine"}, answer_prefix="{")


def test_a_missing_library_is_told_before_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(ConfigError, match="xgrammar cannot be imported"):
        check_library()
