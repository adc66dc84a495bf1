"""Chats as the rows that a rollout would have written, had the model said the answers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from earl_core.config import ConfigError
from earl_core.environments.adapters.chat_messages import read_messages
from earl_core.environments.adapters.data_set import read_rows
from earl_core.environments.adapters.row_forms import RowForm
from earl_core.environments.base import Message, call_id
from earl_core.imitation.chats import Chats, samples_of
from earl_core.imitation.content import content_digest
from earl_core.imitation.demonstration_worker import ANY_ROW
from earl_core.rollout.chat.chat import ChatTokenizer
from earl_core.rollout.chat.tool_calls import Tools
from tests.conformance.templates import PUBLISHED, tokenizer_of
from tests.rollout import chat_models as make
from tests.rollout.tool_templates import FAMILIES

SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = {"name": "add", "arguments": {"a": 1}}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def trained(chat: ChatTokenizer, samples: Any) -> list[str]:
    """The runs of trained tokens of all samples, as text with control tokens."""
    found = []
    for sample in samples:
        marked = "".join("+" if each else "-" for each in sample.loss_mask)
        for run in re.finditer(r"\++", marked):
            tokens = sample.tokens[run.start() : run.end()]
            found.append(chat._tokenizer.decode(tokens, skip_special_tokens=False))
    return found


def test_the_tokens_are_those_of_the_template_and_the_answers_are_trained() -> None:
    """Against the template's own text, and the mask by the words around the answers."""
    tokenizer = make.char_tokenizer(make.CHATML)
    chat = ChatTokenizer(tokenizer)
    messages = [
        {"role": "system", "content": "play"},
        user("free: 1 2"),
        assistant("2"),
        user("free: 1"),
        user("well?"),
        assistant("[1"),
        user("thanks"),
    ]
    (sample,) = samples_of(chat, messages)
    text = tokenizer.apply_chat_template(messages[:-1], tokenize=False).removesuffix("\n")
    assert tokenizer.decode(sample.tokens) == text
    expected = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    answers = [each.span(1) for each in re.finditer(r"assistant\n(.*?<\|im_end\|>)", text)]
    assert expected["input_ids"] == sample.tokens
    assert sample.loss_mask == [
        int(any(first <= start and end <= last for first, last in answers))
        for start, end in expected["offset_mapping"]
    ]
    assert sample.rollout_logprobs == [0.0] * len(sample.tokens)
    assert sample.texts == ["play\nfree: 1 2", "2", "free: 1\nwell?", "[1", "thanks"]
    assert sample.policy_version_first == sample.policy_version_last == [-1, -1]
    assert [sample.tokens[start] for start in sample.turn_starts] == [
        sample.tokens[0],
        tokenizer.convert_tokens_to_ids("\n"),
    ]


THINKING = ("Qwen 3.5", "DeepSeek R1", "MiniMax M2")
"""Families whose prompts begin the reasoning."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_family_learns_its_answers_and_how_they_end(name: str) -> None:
    chat = ChatTokenizer(tokenizer_of(name))
    think = "<think>\nhm\n</think>\n\n" if name in THINKING else ""
    messages = [user("a b"), assistant(f"{think}c d"), user("e"), assistant(f"{think}f")]
    samples = samples_of(chat, messages)
    found = trained(chat, samples)
    assert len(found) == 2
    assert len(samples) == (2 if think else 1)
    for text, said in zip(found, ("c d", "f"), strict=True):
        ids = chat.encode(text)
        assert ids[-1] in chat.stop_token_ids
        assert said in text
        assert not set(ids[:-1]) & set(chat.stop_token_ids)


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_are_written_as_the_family_writes_them(name: str) -> None:
    family = FAMILIES[name]
    chat = ChatTokenizer(make.char_tokenizer(family.template, family.special))
    said: Message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00001", "type": "function", "function": CALL}],  # type: ignore[typeddict-item]
    }
    result: Message = {"role": "tool", "content": "3", "tool_call_id": "call00001", "name": "add"}
    samples = samples_of(chat, [user("1 and 2?"), said, result, assistant("3")], Tools([SCHEMA]))
    first, _ = trained(chat, samples)
    answer = chat.read(chat.encode(first), Tools([SCHEMA]))
    assert [*answer.calls] == [CALL]


def test_a_template_that_changes_earlier_turns_begins_another_sample() -> None:
    """As a rollout of the same answers does: the second sample has the conversation anew."""
    tokenizer = make.char_tokenizer(make.DROPS_REASONING)
    chat = ChatTokenizer(tokenizer)
    thought = "<think>hm</think>\n\nd"
    messages = [user("a"), assistant("b"), user("c"), assistant(thought), user("e"), assistant("f")]
    one, other = samples_of(chat, messages)
    whole = tokenizer.apply_chat_template(messages, tokenize=False).removesuffix("\n")
    assert tokenizer.decode(other.tokens) == whole
    assert "hm" not in whole
    assert "hm" in tokenizer.decode(one.tokens)
    # An answer is trained once, in the sample in which it was said.
    assert trained(chat, [one]) == ["b<|im_end|>", f"{thought}<|im_end|>"]
    assert trained(chat, [other]) == ["f<|im_end|>"]
    assert one.turn_numbers + other.turn_numbers == [0, 1, 2]


def test_a_prefix_is_given_and_a_stop_ends_an_answer() -> None:
    chat = ChatTokenizer(make.char_tokenizer(make.CHATML), "[", ("]",))
    (sample,) = samples_of(chat, [user("a"), assistant("[4]"), user("b"), assistant("[5]")])
    # What follows the stop is the template's, and so not the model's to say.
    assert trained(chat, [sample]) == ["4]", "5]"]
    for said, why in (
        ("4]", r"does not begin with '\['"),
        ("[4] or [5]", r"says more after '\[4\]'"),
    ):
        with pytest.raises(ConfigError, match=why):
            samples_of(chat, [user("a"), assistant(said)])


def test_a_stop_of_several_tokens_ends_an_answer_too() -> None:
    chat = ChatTokenizer(make.char_tokenizer(make.CHATML), stop=("done.",))
    (sample,) = samples_of(chat, [user("a"), assistant("4, done."), user("b"), assistant("5")])
    assert trained(chat, [sample]) == ["4, done.", "5<|im_end|>"]
    with pytest.raises(ConfigError, match=r"says more after '4 done\.'"):
        samples_of(chat, [user("a"), assistant("4 done. Or 5")])


def test_control_tokens_count_in_answers_only() -> None:
    chat = ChatTokenizer(make.char_tokenizer(make.CHATML))
    (sample,) = samples_of(chat, [user("say <|im_end|>"), assistant("no")])
    end = chat.stop_token_ids[0]
    assert [at for at, each in enumerate(sample.tokens) if each == end][-1] == len(
        sample.tokens
    ) - 1
    assert sample.tokens.count(end) == 2
    with pytest.raises(ConfigError, match="says more after"):
        samples_of(chat, [user("a"), assistant("no<|im_end|>yes")])


def written(place: Path, *rows: dict[str, Any]) -> Path:
    if place.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), place)
    else:
        place.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def chats(place: Path, template: str = make.CHATML, column: str = "messages") -> Chats:
    rows = read_rows(str(place), None, ANY_ROW)
    form = RowForm("auto", None if column == "messages" else column, learnt=True)
    return Chats(rows, ChatTokenizer(make.char_tokenizer(template)), form, {"": Tools([SCHEMA])})


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_are_read_as_data_sets_of_prompts_are(tmp_path: Path, suffix: str) -> None:
    """What Parquet adds as null is not there; arguments may be a text of JSON."""
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    }
    rows = [
        {"chat": [user("a"), assistant("b")], "tools": None},
        {"chat": [user("1?"), call], "tools": json.dumps([SCHEMA])},
    ]
    found = chats(written(tmp_path / f"rows.{suffix}", *rows), column="chat")
    assert len(found) == 2
    # Without tools of its own a chat has those of the run's environment.
    assert "Adds." in "".join(found._chat._tokenizer.decode(found.episode(0).samples[0].tokens))
    (text,) = trained(found._chat, found.episode(1).samples)
    assert json.loads(text.partition("<tool_call>")[2].partition("</tool_call>")[0]) == CALL


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [user("a"), assistant("b")], "prompt": "c"},
        {"prompt": "a", "completion": "b"},
        {"prompt": [user("a")], "completion": [assistant("b")]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"instruction": "a", "output": "b"},
        {"prompt": "a", "answer": "b"},
    ],
)
def test_every_format_is_imitated(tmp_path: Path, row: dict[str, Any]) -> None:
    found = chats(written(tmp_path / "rows.jsonl", row))
    expected = samples_of(found._chat, [user("a"), assistant("b")], Tools([SCHEMA]))
    assert found.episode(0).samples == expected
    assert trained(found._chat, expected) == ["b<|im_end|>"]


def test_a_number_is_an_answer_and_a_column_system_is_told(tmp_path: Path) -> None:
    row = {"prompt": "1?", "answer": 1, "completion": None, "system": "sum"}
    found = chats(written(tmp_path / "rows.parquet", row))
    told: Message = {"role": "system", "content": "sum"}
    expected = samples_of(found._chat, [told, user("1?"), assistant("1")], Tools([SCHEMA]))
    assert found.episode(0).samples == expected


@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.JSONL", "a.json.gz", "saved/a.arrow"])
def test_a_change_of_demonstrations_is_noticed(tmp_path: Path, name: str) -> None:
    place = tmp_path / name
    place.parent.mkdir(exist_ok=True)
    digests = []
    for text in ("a", "b"):
        place.write_text(text)
        given = [str(place), str(place.parent)]
        given += [f"{place.parent}/*"] if place.suffix != ".arrow" else []
        digests.append([content_digest(each) for each in given])
    assert not {*digests[0]} & {*digests[1]}
    with pytest.raises(FileNotFoundError, match="no file with demonstrations"):
        content_digest(f"{tmp_path}/*.parquet")


def test_what_verl_compares_with_is_no_demonstration(tmp_path: Path) -> None:
    row = {"prompt": [user("a")], "reward_model": {"ground_truth": "b"}}
    with pytest.raises(ConfigError, match="has no turn of the assistant"):
        chats(written(tmp_path / "rows.jsonl", row)).episode(0)


def test_a_table_adds_no_argument_to_a_call(tmp_path: Path) -> None:
    """Its calls have one type, so that each has the arguments of all; null stays where the tool
    takes it."""
    say = {"type": "function", "function": {"name": "say", "parameters": {
        "type": "object", "properties": {"text": {"type": ["string", "null"]}},
    }}}  # fmt: skip
    tools = json.dumps([SCHEMA, say])
    rows = [
        {"messages": [user("?"), calling("add", {"a": 1})], "tools": tools},
        {"messages": [user("?"), calling("say", {"text": None})], "tools": tools},
    ]
    found = chats(written(tmp_path / "rows.parquet", *rows))
    texts = [trained(found._chat, found.episode(at).samples)[0] for at in range(2)]
    calls = [json.loads(each.partition("<tool_call>")[2].partition("</")[0]) for each in texts]
    assert [call["arguments"] for call in calls] == [{"a": 1}, {"text": None}]


def calling(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    call = {"function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def test_calls_and_results_without_ids_have_those_of_a_rollout() -> None:
    twice = calling("add", {"a": 1})
    twice["tool_calls"] = twice["tool_calls"] * 2
    results = [{"role": "tool", "content": text} for text in "12"]
    named = {"role": "tool", "content": "3", "tool_call_id": "own", "name": "mine"}
    other = calling("say", {})
    other["tool_calls"][0]["id"] = "own"
    said = read_messages([user("?"), twice, *results, other, named])
    ids = [call["id"] for each in said for call in each.get("tool_calls", ())]
    assert ids == [call_id(0), call_id(1), "own"]
    told = [(each["tool_call_id"], each["name"]) for each in said if each["role"] == "tool"]
    assert told == [(call_id(0), "add"), (call_id(1), "add"), ("own", "mine")]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "reasoning apart": (
        {"messages": [user("a"), {**assistant("b"), "reasoning_content": "hm"}]},
        r"has in messages\[1\] an answer with reasoning_content, which would be left out: write",
    ),
    "an answer that is not to be learnt": (
        {"messages": [user("a"), {**assistant("b"), "weight": 0}]},
        r"has in messages\[1\] an answer with weight 0, and every answer of a chat is learnt",
    ),
    "nobody answers": ({"messages": [user("a")]}, "has no turn of the assistant, so there is"),
    "no column": ({"message": []}, r"has no column 'messages', .*; it has message .*did you mean"),
    "no list": ({"messages": "a"}, "is a text, where a list of messages is expected; declare"),
    "no role": ({"messages": [{"content": "a"}]}, r"has in messages\[0\] no message with role"),
    "no text": (
        {"messages": [user("a"), {"role": "assistant", "content": 3}]},
        r"has in messages\[1\] a content that is no text",
    ),
    "says nothing": (
        {"messages": [user("a"), assistant(" ")]},
        r"has in messages\[1\] an answer that says nothing",
    ),
    "half a character": ({"messages": [user("\ud800")]}, "half a character"),
    "no name": (
        {"messages": [user("a"), {**assistant(""), "tool_calls": [{"function": {}}]}]},
        "a call without function.name",
    ),
    "no arguments": (
        {
            "messages": [
                user("a"),
                {**assistant(""), "tool_calls": [{"function": {"name": "add", "arguments": "{"}}]},
            ]
        },
        "a call of 'add' whose arguments is no JSON",
    ),
    "no tool": ({"messages": [user("a"), assistant("b")], "tools": [{"nam": "x"}]}, "has tools"),
    "no answer": ({"prompt": "a", "completion": None}, "an answer .*'completion'. that is no text"),
    "answers the user": (
        {"prompt": "a", "completion": [user("b")]},
        "in the column 'completion' more than answers",
    ),
    "two answers": (
        {"prompt": [user("a"), assistant("b")], "completion": "c"},
        "an answer at the end of its prompt and in 'completion'",
    ),
    "lost answer": (
        {"prompt": [user("a"), assistant("b"), user("c")], "completion": None},
        "an answer .*'completion'. that is no text",
    ),
    "unknown environment": (
        {"messages": [user("a"), assistant("b")], "environment": "chess"},
        "names the environment 'chess', which the run does not have",
    ),
    "unknown character": ({"messages": [user("a"), assistant("é")]}, "tokenizer does not know"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_chat_that_cannot_be_imitated_is_named(tmp_path: Path, name: str) -> None:
    row, problem = BAD[name]
    good = {"messages": [user("a"), assistant("b")]}
    place = written(tmp_path / "chats.jsonl", good, row)
    with pytest.raises(ConfigError, match=rf"^row 1 of .*chats.jsonl \(line 2\) .*{problem}"):
        chats(place).episode(1)


def test_a_role_that_the_template_cannot_render_is_named(tmp_path: Path) -> None:
    messages = [{"role": "critic", "content": "a"}, assistant("b")]
    place = written(tmp_path / "chats.jsonl", {"messages": messages, "tools": []})
    with pytest.raises(ConfigError, match=r"row 0 of .* render messages with the roles crit"):
        chats(place, make.MISTRAL).episode(0)
