"""One reading of YAML for run files and `--set`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from earl_core.config import ConfigError, load_config
from earl_core.config.yaml_text import read_yaml, write_yaml

RUN = """\
name: a
iterations: 2
model: {path: models/x}
environment: {name: tic_tac_toe, options: {level: VALUE}}
rollout: {prompts_per_iteration: 4, group_size: 2, max_turns: 5}
"""

SCALARS: list[tuple[str, Any]] = [
    ("1e-3", 0.001),
    ("1E5", 1e5),
    (".5", 0.5),
    ("5.", 5.0),
    ("+3", 3),
    ("010", 10),
    ("0o17", 15),
    ("0x1F", 31),
    ("1_000", "1_000"),
    ("1:30", "1:30"),
    ("2026-01-02", "2026-01-02"),
    ("yes", "yes"),
    ("off", "off"),
    ("NO", "NO"),
    ("y", "y"),
    ("true", True),
    ("FALSE", False),
    ("~", None),
    ("nan", "nan"),
    ("inf", "inf"),
    ('"1e-3"', "1e-3"),
    ("'010'", "010"),
    ('"true"', "true"),
    ('"null"', "null"),
    ("!!str 1e5", "1e5"),
    ("!!int 010", 10),
    ("!!float 1", 1.0),
    ("0.1.2", "0.1.2"),
    ("1e", "1e"),
]


@pytest.mark.parametrize(("text", "value"), SCALARS)
def test_a_file_and_an_override_read_alike(tmp_path: Path, text: str, value: Any) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(RUN.replace("VALUE", text))
    in_file = load_config(file).environment.options["level"]
    file.write_text(RUN.replace("VALUE", "x"))
    given = load_config(file, [f"environment.options.level={text}"]).environment.options["level"]
    assert [in_file, given] == [value, value]
    assert type(in_file) is type(given) is type(value)


def test_infinite_numbers_are_numbers() -> None:
    found = read_yaml("[.inf, -.INF, .nan]", "it")
    assert found[:2] == [math.inf, -math.inf]
    assert math.isnan(found[2])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "the key 'a' stands twice, in line 1 and in line 3"),
        ("a: {b: 1,\n 'b': 2}", "the key 'b' stands twice, in line 1 and in line 2"),
        ("- {1: a, 0x1: b}", "the key 1 stands twice"),
        ("a: &a {<<: *a}", "undefined alias|holds itself"),
        ("a: &a [*a]", "the anchor in line 1 holds itself"),
        ("? [a]\n: 1", "the key in line 1 is no text"),
        ("a: b: c", "not valid YAML"),
        ("a: \"\\ud800\"", "the text in line 1 holds half a character"),
        ("!!python/object:os.system x", "not valid YAML"),
        ("a: 1\n---\nb: 2", "not valid YAML"),
        ("!!int 1.5", "no whole number"),
        ("9" * 5000, "too many digits"),
        ("[" * 20_000, "nested too deeply"),
        ("a0: &a0 [x]\n" + "".join(
            f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
        ), "more than 200,000 values with its anchors"),
    ],
)  # fmt: skip
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_yaml(text, "the text")


def test_anchors_and_merges_are_read() -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {<<: *a, x: 2}\nc: {<<: [*a, *b], x: 3, z: *b}"
    assert read_yaml(text, "it")["c"] == {"x": 3, "y": 1, "z": {"x": 2, "y": 1}}


def test_a_run_file_has_bounds_and_an_encoding(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    text = RUN.replace("VALUE", "é")

    def refused(content: bytes, message: str) -> None:
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=message) as caught:
            load_config(file)
        assert str(file) in str(caught.value)

    refused(text.encode("utf-16"), r"is not UTF-8 \(it is UTF-16\): save it as UTF-8")
    refused(text.encode("utf-16-le"), r"is not UTF-8 \(it is UTF-16\)")
    refused(text.encode("latin-1"), "byte 0xe9 in line 4, as in Latin-1")
    refused(b"#" * (5 << 20), "more than 4 MiB")
    file.write_bytes(text.encode("utf-8-sig"))
    assert load_config(file).environment.options == {"level": "é"}


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text("0123456789eExo.-+:_ tynaulf~'\"#\u00e9", max_size=8)
)


@given(st.dictionaries(st.text(max_size=5), LEAVES | st.lists(LEAVES, max_size=3), max_size=4))
def test_what_is_written_is_read_back(value: dict[str, Any]) -> None:
    assert read_yaml(write_yaml(value), "it") == value
