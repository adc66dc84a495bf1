"""What rules of redaction find in texts, in whatever form it stands there."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from pydantic import BaseModel, ValidationError

from earl_core.secrets import (
    learn_rules,
    redact_error,
    redactor,
    shareable_names,
    shareable_tree,
    shareable_values,
)
from earl_core.secrets.rules import Redaction, RedactionRules
from earl_core.system.errors import ConfigError
from tests.calls import calls_of


def redaction(*words: str, **rules: Any) -> Redaction:
    return Redaction(RedactionRules(words=words, **rules))


@pytest.fixture
def ada(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A rule that this process applies to all that it shows."""
    monkeypatch.setattr(redactor, "_rules", {})
    learn_rules("a file", redaction("Ada Lovelace").hide)
    yield
    redactor._changed.cache_clear()


@pytest.mark.parametrize(
    "form",
    [
        json.dumps("Adá Lovelacë")[1:-1], ascii("Adá Lovelacë")[1:-1], r"\u0041da Lovelace",
        json.dumps(json.dumps("Adá Lovelace")), html.escape("Ada&Lovelace"), "Ad&aacute; Lovelace",
        "Ada&nbsp;Lovelace", "&#65;da &#x4c;ovelace", quote("Ada Lovelace"),
        quote_plus("Adá Lovelace"), "ada.lovelace@example.org", "/home/ada_lovelace",
        "#AdaLovelace", "Ada, Lovelace", "**Ada** Lovelace", r"Ada\_Lovelace", "Ada Love-\nlace",
        "Ada Love\n  lace",
        r"Ada\nLovelace", "\x1b[1;31mAda\x1b[0m Lovelace", r"\u001b[31mAda\u001b[0m Lovelace",
        "A\x00da Lovelace", "Ada\ue000 Love\ud800lace", "Ada\u2800Lovelace", "Ada\u3164Lovelace",
        "ᴀᴅᴀ ʟᴏᴠᴇʟᴀᴄᴇ", "A\u200fda Love\u202elace",
    ],
)  # fmt: skip
def test_a_word_is_found_in_each_form(form: str) -> None:
    shown = redaction("Ada Lovelace").hide(f"before {form} after")
    assert "(hidden)" in shown
    assert "ovelac" not in shown.casefold()
    assert shown.startswith("before ")
    assert shown.endswith(" after")


def test_what_only_looks_escaped_is_found_as_it_stands() -> None:
    rules = redaction("new folder", "U.S.", "O’Neil", patterns=[{"name": "p", "match": "P-\\d+"}])
    assert rules.hide(r"C:\new folder") == r"C:\(hidden)"
    assert rules.hide("use us") == "use us"
    assert rules.hide("the u.s. O'Neil") == "the (hidden) (hidden)"
    assert rules.hide(r"P\u002d123") == "(hidden)"
    # Short words are not looked for over breaks of lines.
    assert redaction("ann").hide("can\nnot") == "can\nnot"


def test_expressions_have_a_deadline_and_hide_what_they_cannot_look_at() -> None:
    rules = redaction(patterns=[{"name": "slow", "match": "(?:a|aa)+$"}])
    # Without a deadline, either would take the age of the world.
    assert rules.hide("a" * 60 + "!") == rules.hide("b" + "a" * 60 + "!") == "(hidden)"
    (said,) = rules.told()
    assert said.startswith("pattern slow of the rules of redaction took too long over 2 texts")
    assert rules.hide("nothing of it") == "nothing of it"


def test_text_that_is_not_ascii_takes_few_calls() -> None:
    text = "The quick brown fox — “über” the lazy dogs.\n" * 500
    rules = redaction("Ada Lovelace")
    assert rules.hide(text) == text
    assert calls_of(lambda: rules.hide(text)) < 3 * len(text)


@pytest.mark.parametrize(
    "match", [r"\S+\s", r"(?<= )\S+", "[A-Z][a-z]+ [A-Z][a-z]+", "[a-z]{3,}", "[^0-9]+"]
)
def test_patterns_that_leave_next_to_nothing_are_refused(match: str) -> None:
    with pytest.raises(ConfigError, match="hide every word"):
        redaction(patterns=[{"name": "all", "match": match}])


def test_capitals_may_be_told_apart() -> None:
    rules = redaction(patterns=[{"name": "n", "match": "(?-i:[A-Z][a-z]+ [A-Z][a-z]+)"}])
    assert rules.hide("here Ada Lovelace met john smith") == "here (hidden) met john smith"


class _Model(BaseModel):
    age: int


class _Own(Exception):
    def __init__(self, who: str) -> None:
        self.who = who

    def __str__(self) -> str:
        return f"nobody is {self.who}"


def _validation() -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        _Model.model_validate({"age": "Ada Lovelace"})
    return caught.value


@pytest.mark.parametrize(
    "error",
    [
        ValueError({"who": "Ada Lovelace"}), ValueError(b"Ada Lovelace"), _Own("Ada Lovelace"),
        ValueError(KeyError("Ada Lovelace")), OSError(2, "is not there", "/home/ada-lovelace"),
        ExceptionGroup("both", [ValueError("Ada Lovelace")]), _validation(),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_no_error_tells_a_word(ada: None, error: Exception) -> None:
    outer = ValueError("outer")
    outer.__cause__ = error
    for one in (error, outer):
        shown = redact_error(one)
        for each in (shown, shown.__cause__, *getattr(shown, "exceptions", ())):
            assert "lovelace" not in f"{each} {each!r}".casefold()


def test_our_own_words_may_be_hidden(ada: None) -> None:
    learn_rules("another", redaction("iteration", "stage").hide)
    line = {"iteration": 3, "time": 1.0, "rollout/stage_seconds": 2.0, "update/loss": 0.5}
    assert shareable_names(line) == {"iteration": 3, "time": 1.0, "update/loss": 0.5}
    assert shareable_values({"stage": ["Ada Lovelace"]}) == {"stage": ["(hidden)"]}
    assert shareable_tree({"stage": 1}) == {"(hidden)": 1}
