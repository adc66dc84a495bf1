"""Calls amid free text: the grammar lets through no others than its own."""

from __future__ import annotations

import json

import pytest

from earl_core.pretrained.grammars import GrammarError, Grammars
from earl_core.rollout.chat.call_grammars import CALL_FORMS
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.chat.tool_calls import FORMATS, Tools
from earl_core.trajectory.forms import Form
from tests.rollout.chat_models import CHATML, char_tokenizer
from tests.rollout.test_forms import TOOLS

OTHERWISE = {
    "hermes": ['<tool_call>{"name":"h","arguments":{}}</tool_call>'],
    "qwen_xml": ["<function=h></function>", "<tool_call><function=h></function></tool_call>"],
    "llama3": ['<|python_tag|>{"name": "h", "parameters": {}}'],
    "mistral": ['[TOOL_CALLS] [{"name": "h", "arguments": {}}]'],
    "mistral_named": ["[TOOL_CALLS]h{}"],
    "deepseek": ["<｜tool▁call▁begin｜>h<｜tool▁sep｜>{}<｜tool▁call▁end｜>"],
    "glm": ["<tool_call>\nh</tool_call>"],
    "phi4": ['<|tool_call|> [{"name": "h", "arguments": {}}]<|/tool_call|>'],
    "json": [],
}
"""Calls of no tool that the parsers read amid a text, though no template writes them so."""
ALONE = {
    "llama3": ['{"name": "h", "parameters": {}}', ' {"name":"f", "parameters": {}}'],
    "json": ['[{"name": "h", "arguments": {}}]', '```json\n{"name": "h", "arguments": {}}```'],
}
"""The same, as whole answers."""


@pytest.mark.parametrize("form", sorted(CALL_FORMS))
def test_free_text_holds_no_other_calls_than_the_grammar_s(form: str) -> None:
    """Whatever the parser of the format takes for a call."""
    chat = ChatTokenizer(char_tokenizer(CHATML), tool_format=form)
    grammars = Grammars(char_tokenizer(CHATML), 128)

    def accepts(text: str, single: bool) -> bool:
        part = CALL_FORMS[form].among(TOOLS, single)
        held = Form(json.dumps({"type": "structural_tag", "format": part}), (3,))
        try:
            matcher = grammars.matcher(held)
            matcher.say(text)
            matcher.accept(3)
        except GrammarError:
            return False
        return True

    def read(text: str) -> list[str]:
        return [each["name"] for each in chat.parser.parse(text, Tools(TOOLS))[1]]

    written = CALL_FORMS[form]
    values = {
        "qwen_xml": "<parameter=colour>red</parameter>",
        "glm": "<arg_key>colour</arg_key><arg_value>red</arg_value>",
    }
    given = values.get(form, '{"colour": "red"}')
    call = f"{written.before}{written.begin}{given}{written.end}{written.after}"
    said = "" if form in ALONE else "Now: "
    one = call.replace("NAME", "g")
    assert accepts("Now: a text", True)
    assert accepts(f"{said}{one}", True)
    assert read(f"{said}{one}") == ["g"]
    refused = [f"{said}{call.replace('NAME', 'h')}", f"{said}{one.replace('red', 'green')}"]
    if written.between is not None:
        assert accepts(f"{said}{one}{one}", False)
        assert not accepts(f"{said}{one}{one}", True)
    for text in [*refused, *(f"Now: {each}" for each in OTHERWISE[form]), *ALONE.get(form, [])]:
        assert read(text), text
        assert not accepts(text, False), text


def test_deepseek_s_calls_are_read_as_such() -> None:
    """Written as its grammar does, by hand: its signs are in no vocabulary of ASCII characters."""
    chat = ChatTokenizer(char_tokenizer(CHATML), tool_format="deepseek")
    part = CALL_FORMS["deepseek"].calls(TOOLS, True)
    begin, calls, end = part["elements"]
    tag = calls["tags"][1]
    written = "".join([begin["value"], tag["begin"], '{"colour": "red"}', tag["end"], end["value"]])
    assert chat.parser.parse(written, Tools(TOOLS))[1] == [
        {"name": "g", "arguments": {"colour": "red"}}
    ]
    assert FORMATS.keys() - CALL_FORMS.keys() == {"gemma4"}
