"""The prompt environment, its reward functions, and the registry."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from earl_core.environments.registry import check, create
from earl_core.system.errors import ConfigError

USER = "tests.environments.user_environments"
REWARDS = "tests.environments.user_rewards"
ROWS = [{"prompt": "1+1?", "answer": "2"}, {"prompt": "2+2?", "answer": "4"}]


@pytest.fixture(params=["jsonl", "parquet"])
def data(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    path = tmp_path / f"rows.{request.param}"
    if request.param == "jsonl":
        path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    else:
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    return str(path)


def test_questions_and_rewards(data: str) -> None:
    environment = create("prompt", {"path": data, "system_prompt": "Be brief."})
    assert environment.reset(3, 0) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2?"},
    ]
    result = environment.step(" 4 ")
    assert (result.reward, result.done, result.info["outcome"]) == (1.0, True, "correct")
    with pytest.raises(RuntimeError, match="reset"):
        environment.step("4")
    assert environment.reset(0, 0)[1]["content"] == "1+1?"
    assert environment.step("3").info["outcome"] == "incorrect"


def test_fsspec_urls_and_own_reward_functions(data: str) -> None:
    options = {"path": f"file://{data}", "reward_function": f"{REWARDS}:half_reward"}
    environment = create("prompt", options)
    environment.reset(0, 0)
    result = environment.step("abc")
    assert result.reward == 0.5
    assert result.info == {"outcome": "half", "metrics": {"length": 3.0}}


def test_chat_prompts_and_other_columns(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "3*5?"},
    ]
    path = tmp_path / "chat.parquet"
    pq.write_table(pa.Table.from_pylist([{"turns": turns, "solution": "so it is #### 15"}]), path)
    options = {
        "path": str(path),
        "prompt_column": "turns",
        "answer_column": "solution",
        "reward_function": "earl_core.environments.rewards:contained_number",
    }
    environment = create("prompt", options)
    assert environment.reset(7, 0) == turns
    assert environment.step("That makes 15.").reward == 1.0


USER_SAYS = {"role": "user", "content": "3*5?"}
SAID = {"role": "assistant", "content": "15"}
SYSTEM = {"role": "system", "content": "Multiply."}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALLS: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": '{"a": 1}'}}],
}
TURNS = [{"from": "human", "value": "3*5?"}, {"from": "gpt", "value": "15"}]
VERL = {"reward_model": {"style": "rule", "ground_truth": "15"}, "data_source": "x"}

ROWS_OF: list[tuple[str, dict[str, Any]]] = [
    ("openai", {"messages": [USER_SAYS, SAID]}),
    ("openai", {"messages": json.dumps([USER_SAYS, SAID])}),
    (
        "openai",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "3*5?"}]},
                {**SAID, "content": [{"type": "text", "text": "15"}]},
            ]
        },
    ),
    ("trl", {"prompt": "3*5?", "completion": "15"}),
    ("trl", {"prompt": [USER_SAYS], "completion": [SAID]}),
    ("trl", {"messages": [USER_SAYS, SAID]}),
    ("verl", {"prompt": [USER_SAYS], **VERL}),
    ("sharegpt", {"conversations": TURNS}),
    ("alpaca", {"instruction": "3*5?", "input": "", "output": "15"}),
    ("plain", {"prompt": "3*5?", "answer": "15"}),
    ("auto", {"prompt": "3*5?", "answer": "15", "tools": "calculator"}),
    ("auto", {"prompt": "3*5?", "answer": "15", "tools": ["calculator"]}),
    ("plain", {"prompt": "3*5?", "answer": 15}),
]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(("form", "row"), ROWS_OF)
def test_every_format_asks_and_scores(
    tmp_path: Path, form: str, row: dict[str, Any], suffix: str
) -> None:
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_text(json.dumps(row))
    else:
        pq.write_table(pa.Table.from_pylist([row]), path)
    read = 0
    for named in ("auto", "openai", "trl", "verl", "sharegpt", "alpaca", "plain"):
        try:
            environment = create("prompt", {"path": str(path), "format": named})
        except ConfigError:
            # A format that is not the row's refuses it, or reads the same.
            assert named != form
            assert named != "auto" or isinstance(row.get("messages"), str)
            continue
        assert environment.reset(0, 0) == [USER_SAYS]
        assert environment.step("15").reward == 1.0
        environment.reset(0, 0)
        assert environment.step("16").reward == 0.0
        read += 1
    assert read >= 1


@pytest.mark.parametrize(
    ("options", "row", "message"),
    [
        ({"format": "chatml"}, {"prompt": "a"}, "'format' must be one of 'auto', 'openai'"),
        (
            {"format": "openai"},
            {"messages": "a"},
            "is not a list of messages with role and content",
        ),
        ({"format": "openai"}, {"messages": TURNS}, "is not a list of messages .* format openai"),
        ({"format": "openai"}, {"messages": [USER_SAYS]}, "has no answer: its chat does not end"),
        (
            {"format": "openai"},
            {"prompts": "a"},
            "has no column 'messages' or 'prompt', which format 'openai' reads; it has prompts",
        ),
        ({"format": "openai"}, {"messages": [SAID]}, "has nothing before its answer"),
        ({"format": "openai"}, {"messages": "[{"}, "'messages' a text that is no JSON"),
        (
            {"format": "sharegpt"},
            {"conversations": [USER_SAYS]},
            "is not a list of turns",
        ),
        ({}, {"conversations": [{"from": "critic", "value": "a"}]}, r"\[0\] a turn from 'critic'"),
        ({"format": "verl"}, {"prompt": [USER_SAYS]}, "has no column 'reward_model.ground_truth'"),
        ({"format": "verl"}, {"prompt": "3*5?", **VERL}, "is not a list of messages"),
        ({"format": "plain"}, {"prompt": [USER_SAYS], "answer": "15"}, "is not a text"),
        ({"format": "trl"}, {"prompt": "a", "completion": [SAID, SAID]}, "of 2 messages"),
        ({"format": "trl"}, {"prompt": "a", "completion": None}, "'completion'. that is null"),
        ({"format": "trl"}, {"prompt": "a", "completion": [USER_SAYS]}, "that the user says"),
        (
            {"format": "verl"},
            {"prompt": [USER_SAYS], "reward_model": None},
            "'reward_model'. .* null",
        ),
        (
            {},
            {"prompt": json.dumps([USER_SAYS]), "answer": "b"},
            "is a text, .* declare its format",
        ),
        ({}, {"prompt": json.dumps(TURNS), "answer": "b"}, "is a text, .* declare its format"),
        (
            {},
            {"prompt": [SYSTEM, USER_SAYS], "answer": "b", "system": "Go."},
            "a system message in",
        ),
        (
            {"reward_function": f"{REWARDS}:scored_as_verl_does"},
            {"prompt": "a", "answer": "b"},
            "has verl's signature",
        ),
        (
            {},
            {"conversations": [{"from": "function_call", "value": '{"name": "f", "args": 1}'}]},
            r"\[0\] a function_call with args",
        ),
        (
            {},
            {"prompt": "a", "answer": "b", "tools": [{"name": "x", "input_schema": {}}]},
            "tools that cannot be used",
        ),
        ({"format": "alpaca"}, {"instruction": "a", "input": 3, "output": "b"}, "'input' no text"),
        ({}, {"messages": [USER_SAYS, CALLS]}, "an answer .* that is a dict, neither a text nor"),
        ({}, {"prompt": "a", "reward_model": {"ground_truth": {"x": 1}}}, "that is a dict"),
        ({"reward_function": f"{REWARDS}:half_reward"}, {"prompt": "a", "answer": None}, "is null"),
        ({}, {"prompt": [USER_SAYS], "answer": "b", "tools": [{"x": 1}]}, "tools that cannot be"),
        (
            {},
            {"prompt": [{**SAID, "function_call": {}, "tool_calls": 3}], "answer": "b"},
            "no list",
        ),
    ],
)
def test_a_row_that_does_not_fit_its_format_is_named(
    tmp_path: Path, options: dict[str, Any], row: dict[str, Any], message: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(ConfigError, match=message):
        check("prompt", {"path": str(path), **options})


def test_calls_tools_and_system_messages_reach_the_model(tmp_path: Path) -> None:
    result = {"role": "tool", "content": "16", "tool_call_id": "c"}
    told = [{"role": "developer", "content": "Add."}, USER_SAYS, CALLS, result, SAID]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": told, "tools": json.dumps([ADD["function"]])}))
    first, *others = create("prompt", {"path": str(path)}).reset(0, 0)
    assert first == {"role": "system", "content": "Add.", "tools": [ADD]}
    assert others[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert others[2] == {**result, "name": "add"}
    (other, *_) = create("prompt", {"path": str(path), "system_prompt": "Own."}).reset(0, 0)
    assert other["content"] == "Own."


@pytest.mark.parametrize("prompt", ["3*5?", [USER_SAYS], [SYSTEM, USER_SAYS]])
def test_a_column_system_is_asked_with_the_prompt(tmp_path: Path, prompt: Any) -> None:
    row = {"prompt": prompt, "answer": "15", "system": "Multiply."}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    options = {"path": str(tmp_path / "rows.parquet")}
    assert create("prompt", options).reset(0, 0) == [SYSTEM, USER_SAYS]
    # A column that was named says all.
    named = create("prompt", {**options, "prompt_column": "prompt"}).reset(0, 0)
    assert named == [*([SYSTEM] if len(prompt) == 2 else []), USER_SAYS]


def test_alpaca_has_a_history_and_more_input(tmp_path: Path) -> None:
    row = {"instruction": "Add", "input": "1 and 2", "output": "3", "system": "Be brief."}
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{**row, "history": [["Hi", "Hello"]]}]))
    messages = create("prompt", {"path": str(path)}).reset(0, 0)
    assert [each["content"] for each in messages] == ["Be brief.", "Hi", "Hello", "Add\n\n1 and 2"]


def test_columns_for_reward_functions(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    row = {"prompt": "When?", "day": date(2026, 1, 2), "notes": ["a", "b"]}
    pq.write_table(pa.Table.from_pylist([row]), path)
    options = {
        "path": str(path),
        "answer_column": None,
        "reward_function": "earl_core.environments.rewards:nothing",
    }
    environment = create("prompt", {**options, "scoring_columns": ["day", "notes"]})
    environment.reset(0, 0)
    result = environment.step("Today.")
    assert result.reward == 0.0
    assert result.info["scoring"] == {"day": "2026-01-02", "notes": ["a", "b"]}
    with pytest.raises(ConfigError, match=r"no column .hour.*correct the option"):
        create("prompt", {**options, "scoring_columns": ["hour"]})


def test_wrong_data_is_found_before_work_starts(tmp_path: Path) -> None:
    def match(text: str, content: str = "", name: str = "a.jsonl", **options: Any) -> None:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}-{name}"
        if content:
            path.write_text(content)
        with pytest.raises(ConfigError, match=text):
            check("prompt", {"path": str(path), **options})

    row = json.dumps(ROWS[0]) + "\n"
    match("cannot be read: FileNotFoundError")
    match("end in .jsonl, .json, .csv or .parquet", row, name="a.txt")
    match("holds no rows", "\n")
    match("line 2 of .* is no JSON:", row + "{broken")
    match("line 1 of .* is no JSON object", "3\n")
    match("cannot be read: Arrow", row, name="a.parquet")
    match("has no column 'question'; it has prompt, answer", row, prompt_column="question")
    match("row 1 of .* has no column 'answer'", row + '{"prompt": "x"}\n')
    match("neither a text nor a list", '{"prompt": 3, "answer": 4}\n')
    match("package.module:name", row, reward_function="math.sqrt")
    match("cannot be imported: ModuleNotFoundError", row, reward_function="nowhere.at:all")
    match("has no attribute 'nothing'", row, reward_function="math:nothing")
    match("is not a function", row, reward_function="math:pi")
    match("line 2 of .* is no JSON", row + "[" * 100_000)
    match("no function of .completion, row.", row, reward_function="math:sqrt")
    match("no function of .completion, row.", row, reward_function="builtins:max")
    match("is a coroutine function", row, reward_function=f"{REWARDS}:scored_later")


def test_further_arguments_by_name_are_no_place_for_messages(data: str) -> None:
    named = f"{REWARDS}:scored_strictly"
    environment = create("prompt", {"path": data, "reward_function": named})
    environment.reset(0, 0)
    assert environment.step("2").reward == 0.5


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("chess", {}, "no environment 'chess': use one of tic_tac_toe, connect_four"),
        ("nowhere.at:All", {}, "cannot be imported"),
        (f"{USER}:Counting", {"rounds": 3}, "cannot be made .* unexpected keyword"),
        (f"{USER}:Refusing", {}, "no sandbox here"),
        (f"{USER}:NotAnEnvironment", {}, "must have the methods reset"),
        ("prompt", {}, "option 'path' is missing"),
        ("prompt", {"path": ""}, "option path is empty: name a file"),
        ("verifiers", {}, "'verifiers' is an agent: name it by environment.agent"),
        ("agent:verifers", {}, "no agent 'verifers': did you mean 'verifiers'"),
    ],
)
def test_the_registry_explains(name: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        check(name, options)


def test_user_environments_by_import_path() -> None:
    environment = create(f"{USER}:Counting", {"turns": 1})
    environment.reset(5, 0)
    assert environment.step("x").done


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, earl_core.environments.hosting.pool, earl_core.environments.registry as r\n"
        "r.check('tic_tac_toe'); r.check('connect_four')\n"
        "print([m for m in ('torch', 'transformers', 'vllm', 'prefect', 'mlflow', 'numpy', "
        "'pyarrow', 'textarena') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
