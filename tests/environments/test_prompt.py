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
    options = {"path": f"file://{data}", "reward_function": f"{USER}:half_reward"}
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


def test_reward_functions_must_return_numbers(data: str) -> None:
    environment = create("prompt", {"path": data, "reward_function": f"{USER}:bad_reward"})
    environment.reset(0, 0)
    with pytest.raises(TypeError, match="must return a finite number"):
        environment.step("x")


def test_wrong_data_is_found_before_work_starts(tmp_path: Path) -> None:
    def match(text: str, content: str = "", name: str = "a.jsonl", **options: Any) -> None:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}-{name}"
        if content:
            path.write_text(content)
        with pytest.raises(ConfigError, match=text):
            check("prompt", {"path": str(path), **options})

    row = json.dumps(ROWS[0]) + "\n"
    match("cannot be read: FileNotFoundError")
    match("end in .jsonl or .parquet", row, name="a.csv")
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
    match("is a coroutine function", row, reward_function=f"{USER}:scored_later")


def test_further_arguments_by_name_are_no_place_for_messages(data: str) -> None:
    named = f"{USER}:scored_strictly"
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
