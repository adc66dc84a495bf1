"""Rows of a data set that cannot be asked or scored are found before work, by file and row."""

from __future__ import annotations

import gzip
import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from earl_core.environments.adapters.row_files import ArrowRows
from earl_core.environments.adapters.row_forms import Form, RowForm
from earl_core.environments.registry import check, create
from earl_core.system.errors import ConfigError

REWARDS = "earl_core.environments.rewards"
GOOD: dict[str, Any] = {"prompt": "1+1?", "answer": "2", "weight": 1.0}
CHAT = [{"role": "user", "content": "1+1?"}]

BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "is an empty list"),
    ({"prompt": None}, "is null"),
    ({"prompt": ""}, "is empty"),
    ({"prompt": " \n"}, "is empty"),
    ({"prompt": "\u00a0"}, "is empty"),
    ({"prompt": 7}, "is neither a text nor a list of messages"),
    ({"prompt": {"role": "user", "content": "x"}}, "is neither a text nor a list"),
    ({"prompt": "cut \ud83d here"}, "half a character"),
    ({"prompt": ["x"]}, "no message with role and content"),
    ({"prompt": [{"role": "judge", "content": "x"}]}, "a message whose role"),
    ({"prompt": [{"role": "user", "content": None}]}, "content that is no text"),
    ({"prompt": [{"role": "user", "content": ""}]}, "no message says anything"),
    ({"prompt": [{"role": "user", "content": "\udfff"}]}, "half a character"),
    ({"answer": None}, "an answer .* is null"),
    ({"answer": ""}, "an answer .* is empty"),
    ({"answer": math.nan}, "an answer .* is nan"),
    ({"answer": ["2"]}, "an answer .* is a list"),
    ({"answer": "two"}, "an answer .* holds no number"),
    ({"answer": True}, "an answer .* is True"),
    ({"weight": math.nan}, "'weight' the number nan"),
    ({"weight": {"a": [1, math.inf]}}, "'weight' the number inf"),
    ({"weight": "\ud800"}, "'weight' half a character"),
]


def write(path: Path, *rows: dict[str, Any]) -> dict[str, Any]:
    path.write_text("\n".join(map(json.dumps, rows)))
    return options(path)


def options(path: Path) -> dict[str, Any]:
    return {
        "path": str(path),
        "scoring_columns": ["weight"],
        "reward_function": f"{REWARDS}:contained_number",
    }


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_a_row_is_refused_or_left_out(
    tmp_path: Path, bad: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{**GOOD, "prompt": str(number)} for number in range(23)]
    given = write(tmp_path / "a.jsonl", *rows[:20], {**GOOD, **bad}, *rows[20:])
    with pytest.raises(ConfigError, match=rf"row 20 of .*a\.jsonl \(line 21\) has .*{message}"):
        check("prompt", given)
    with caplog.at_level(logging.WARNING):
        environment = create("prompt", {**given, "unusable_rows": "leave_out"})
    assert "1 of the 24 rows" in caplog.text
    asked = [environment.reset(number, 0)[0]["content"] for number in range(24)]
    assert asked == [*map(str, range(23)), "0"]


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("prompt", ["a", None, "b"], "row 1 .*is null"),
        ("prompt", ["a", " ", "b"], "row 1 .*is empty"),
        ("prompt", ["a", "\x0b\x1f", "b"], "row 1 .*is empty"),
        ("prompt", [CHAT, CHAT, []], "row 2 .*an empty list"),
        ("prompt", [CHAT, [{"role": "user", "content": None}], CHAT], "row 1 .*no text"),
        ("prompt", [CHAT, CHAT, [{"role": "x", "content": "y"}]], "row 2 .*role is none of"),
        ("prompt", [CHAT, None, CHAT], "row 1 .*is null"),
        ("prompt", ["a", json.dumps(CHAT), "b"], "row 1 .*is a text, where a list of messages"),
        ("prompt", [1, 2, 3], "row 0 .*neither a text nor a list"),
        ("answer", ["1", "one", "3"], "row 1 .*holds no number"),
        ("answer", [1.0, math.nan, 3.0], "row 1 .*is nan"),
        ("answer", [1, 2, None], "row 2 .*is null"),
        ("answer", [True, False, True], "row 0 .*is True"),
        ("weight", [1.0, None, math.inf], "row 2 .*the number inf"),
        ("weight", [[1.0], [math.nan], None], "row 1 .*the number nan"),
    ],
)
def test_columns_are_looked_at_as_rows_are(
    tmp_path: Path, column: str, values: list[Any], message: str
) -> None:
    good = {name: [value] * 3 for name, value in GOOD.items()}
    pq.write_table(pa.table({**good, column: values}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=message):
        check("prompt", options(tmp_path / "a.parquet"))


def test_a_dotted_name_of_a_field_is_no_path(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["x"], "a": [{"b.c": "1", "b": {"c": "none"}}]})
    pq.write_table(table, tmp_path / "a.parquet")
    given = {**options(tmp_path / "a.parquet"), "scoring_columns": [], "answer_column": "a.b.c"}
    with pytest.raises(ConfigError, match=r"row 0 .*'a\.b\.c'.* holds no number"):
        check("prompt", given)


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    offsets = pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0")
    raw = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"a\xe9")])
    table = pa.table({"prompt": raw, "answer": ["1", "2"], "weight": [1.0, 1.0]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"row 1 of .*not UTF-8"):
        check("prompt", options(tmp_path / "a.parquet"))
    lines = json.dumps(GOOD).replace("1+1?", "é?").encode("utf-16")
    (tmp_path / "b.jsonl").write_bytes(lines)
    with pytest.raises(ConfigError, match=r"b\.jsonl is not UTF-8 \(it is UTF-16\)"):
        check("prompt", options(tmp_path / "b.jsonl"))
    (tmp_path / "c.jsonl").write_bytes(json.dumps(GOOD).encode("utf-8-sig"))
    assert check("prompt", options(tmp_path / "c.jsonl"))


@pytest.mark.timeout(60)
def test_what_is_no_file_or_grows_without_bounds_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.jsonl")
    os.mkfifo(tmp_path / "x.parquet")
    with gzip.open(tmp_path / "x.jsonl.gz", "wb", compresslevel=1) as stream:
        stream.write((json.dumps(GOOD) + " " * 100_000_000).encode())
    (tmp_path / "y.jsonl").symlink_to("/dev/zero")
    for saved, told in (("one", "state.json"), ("split", "dataset_dict.json")):
        (tmp_path / saved).mkdir()
        os.mkfifo(tmp_path / saved / told)
    for place, message in (
        ("x.jsonl", "no regular file"),
        ("x.parquet", "no regular file"),
        ("y.jsonl", "no regular file"),
        ("one", "state.json is no regular file"),
        ("split", "dataset_dict.json is no regular file"),
        ("x.jsonl.gz", "more than 64 MiB once it is decompressed"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            check("prompt", options(tmp_path / place))
        assert place in str(caught.value) or place == "y.jsonl"


def test_a_table_adds_nothing_to_the_schemas_of_tools(tmp_path: Path) -> None:
    one, other = (
        {"name": name, "parameters": {"type": "object", "properties": {name: {"type": "string"}}}}
        for name in ("x", "y")
    )
    bare = {"name": "z"}
    row = {"prompt": "1+1?", "answer": "2", "tools": [one, other, bare]}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    (told,) = create("prompt", {"path": str(tmp_path / "rows.parquet")}).reset(0, 0)
    assert [each["function"] for each in told["tools"]] == [one, other, bare]


def test_a_call_of_sharegpt_has_arguments_or_parameters(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    asked, said = {"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}
    for key in ("arguments", "parameters"):
        call = {"from": "function_call", "value": json.dumps({"name": "f", key: {"a": 1}})}
        path.write_text(json.dumps({"conversations": [asked, call, asked, said]}))
        rows = {"path": str(path.rename(tmp_path / f"{key}.jsonl"))}
        (_, called, _) = create("prompt", rows).reset(0, 0)
        assert called["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}


texts = st.text("ab 1é", min_size=1).filter(str.strip)


@given(st.lists(texts, min_size=2, max_size=6).filter(lambda said: len(said) % 2 == 0))
def test_a_chat_is_read_alike_in_every_form(said: list[str]) -> None:
    roles, speakers = ("user", "assistant"), ("human", "gpt")
    chat = [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]
    turns = [{"from": speakers[at % 2], "value": text} for at, text in enumerate(said)]
    pairs = [said[at : at + 2] for at in range(0, len(said) - 2, 2)]
    *_, question, answer = said
    rows: list[tuple[Form, dict[str, Any]]] = [
        ("openai", {"messages": chat}),
        ("openai", {"messages": json.dumps(chat)}),
        ("trl", {"prompt": chat[:-1], "completion": chat[-1:]}),
        ("trl", {"prompt": chat[:-1], "completion": answer}),
        ("verl", {"prompt": chat[:-1], "reward_model": {"ground_truth": answer}}),
        ("sharegpt", {"conversations": turns}),
        ("alpaca", {"instruction": question, "output": answer, "history": pairs}),
    ]
    for form, row in rows:
        assert RowForm(form).read(row) == (chat[:-1], answer, None)
        if form != "verl":
            assert RowForm(form, learnt=True).chat(row) == chat
    for named in ("auto", "plain"):
        row = {"prompt": question, "answer": answer}
        assert RowForm(named).read(row).prompt == [{"role": "user", "content": question}]


def test_numbers_of_a_table_are_those_that_were_written(tmp_path: Path) -> None:
    """Of single and half precision, in structs too; what is whole stays whole, vectors stay too."""
    single, half = [0.1, 1 / 3, 2.5e-7, 16777217.0, 123456.78], [0.1, 2.333, 65504.0, 1e-7, 5.5]
    table = pa.table(
        {
            "prompt": ["1+1?"] * 5,
            "answer": pa.array(single, pa.float32()),
            "half": pa.array(half, pa.float16()),
            "of": pa.array(
                [{"a": each, "b": each, "c": [("d", each)]} for each in single],
                pa.struct(
                    {
                        "a": pa.float32(),
                        "b": pa.float64(),
                        "c": pa.map_(pa.string(), pa.float32()),
                    }
                ),
            ),
            "vector": pa.array([[each] for each in single], pa.list_(pa.float32())),
        }
    )
    pq.write_table(table, path := tmp_path / "a.parquet")
    rows = [ArrowRows(pq.read_table(path), "a")[at] for at in range(5)]
    assert [row["answer"] for row in rows] == [float(str(np.float32(each))) for each in single]
    assert [row["half"] for row in rows] == [0.1, 2.332, 65504.0, 1e-7, 5.5]
    assert [row["of"]["a"] for row in rows] == [row["answer"] for row in rows]
    assert rows[0]["vector"] == [float(np.float32(0.1))]
    assert [row["of"]["b"] for row in rows] == single
    environment = create("prompt", {"path": str(path)})
    environment.reset(0, 0)
    assert environment.step("0.1").reward == 1.0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": [*CHAT, {"role": "assistant", "content": "2"}], "completion": "2"},
            "has an answer at the end of its prompt and in 'completion'",
        ),
        ({"prompt": CHAT, "completion": ""}, r"an answer \(column 'completion'\) that is empty"),
        ({"instruction": "add", "output": []}, r"an answer \(column 'output'\) that is a list"),
        (
            {"messages": [*CHAT, {"role": "assistant", "content": ""}]},
            r"an answer \(its last message\) that is empty",
        ),
        (
            {"messages": [*CHAT, {"role": "assistant", "function_call": {"name": "f"}}]},
            r"messages\[1\] an answer with function_call \(write it as tool_calls\)",
        ),
    ],
)
def test_what_is_wrong_names_the_columns_that_there_are(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    with pytest.raises(ConfigError, match=message):
        check("prompt", {"path": str(tmp_path / "a.jsonl")})


def test_a_question_without_an_instruction_is_its_input() -> None:
    row = {"instruction": " ", "input": "1+1?", "output": "2"}
    assert RowForm("alpaca").read(row).prompt == CHAT


def test_a_text_is_not_taken_for_a_chat(tmp_path: Path) -> None:
    for column in ("messages", "conversations"):
        table = pa.table({column: [json.dumps(CHAT)] * 2, "answer": ["2", "3"]})
        pq.write_table(table, tmp_path / "a.parquet")
        with pytest.raises(ConfigError, match=r"row 0 .* is a text, where a list of messages"):
            check("prompt", {"path": str(tmp_path / "a.parquet")})
