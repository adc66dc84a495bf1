"""The rate of secrets that are found by their form, and of false alarms."""

from __future__ import annotations

from typing import Any

import pytest

from earl_core.config import ConfigError, parse_config
from earl_core.secrets import find_secrets, redact
from tests.calls import calls_of
from tests.config.secret_values import INNOCENT, TEXTS, VALUES
from tests.config.test_secrets import run_with


def found(value: Any) -> bool:
    return any(find_secrets({"note": value}))


def test_every_form_of_a_provider_is_found_and_hidden() -> None:
    assert len(VALUES) >= 85
    assert [name for name, value in VALUES.items() if not found(value)] == []
    assert [name for name, value in VALUES.items() if "(hidden)" not in redact(value)] == []
    # In the middle of a line, too, and the line stays.
    for name, value in VALUES.items():
        shown = redact(f"request 7 with {value} failed")
        assert value not in shown, name
        assert shown.startswith("request 7 with "), name
    with pytest.raises(ConfigError, match=r"note.*holds a secret"):
        parse_config(run_with("note", VALUES["xAI"]))


def test_passwords_in_texts_are_found_and_nothing_else_is_hidden() -> None:
    for name, (text, secret) in TEXTS.items():
        shown = redact(text)
        assert found(text), name
        assert "(hidden)" in shown, name
        assert not secret or secret not in shown, name
    text, _ = TEXTS["curl"]
    assert redact(text) == "curl -sS -u me:(hidden) https://example.org"
    assert redact(TEXTS["json"][0]) == '{"user": "me", "password": "(hidden)"}'


def test_values_of_runs_are_left_alone() -> None:
    assert len(INNOCENT) >= 200
    assert [value for value in INNOCENT if found(value)] == []
    assert [value for value in INNOCENT if redact(value) != value] == []
    text = "\n".join(INNOCENT)
    assert redact(text) == text


@pytest.mark.parametrize(
    "text",
    ["sk-", "eyJaaaaaaa-", "curl ", "basic:", "cookie:", "password: ", '"password": "', "://a:",
     "-----BEGIN PRIVATE KEY-----", "PuTTY-User-Key-File-3:", "a.b-", "A1b", "token=((",
     "hook.a", "x"],
)  # fmt: skip
def test_no_text_takes_long(text: str) -> None:
    """An expression that reads the whole text again for each of its characters, or worse, would
    take longer than any test may."""
    whole = text * (500_000 // len(text))
    assert redact(whole)


def test_a_line_of_a_log_takes_few_calls() -> None:
    """To read the environment takes several for each of its variables."""
    lines = [f"INFO 11-26 01:17:09 [core.py:{n}] {value}" for n, value in enumerate(INNOCENT)]
    assert [redact(line) for line in lines] == lines
    assert calls_of(lambda: [redact(line) for line in lines]) < 100 * len(lines)
