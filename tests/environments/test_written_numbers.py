"""Numbers as people and models write them: each line's value by hand."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from earl_core.environments import rewards
from earl_core.environments.rewards.written_numbers import numbers, plain

WRITTEN: list[tuple[str, str | None]] = [
    # signs and dashes
    ("The answer is \N{MINUS SIGN}5", "-5"),
    ("The answer is \N{EN DASH}5.", "-5"),
    ("x=\N{NON-BREAKING HYPHEN}5", "-5"),
    ("\N{FULLWIDTH HYPHEN-MINUS}\N{FULLWIDTH DIGIT FIVE}", "-5"),
    ("-$5", "-5"),
    ("$-5$", "-5"),
    ("10-5", "5"),
    ("10\N{EN DASH}5", "5"),
    ("pp. 3--5", "5"),
    ("(a)-5", "5"),
    ("from 10 to -5", "-5"),
    ("the end\N{EM DASH}5", "5"),
    # thousands and decimals
    ("100000000000000000001", "100000000000000000001"),
    ("so 1,234.50", "1234.5"),
    ("1.234,56", "1234.56"),
    ("1.234.567", "1234567"),
    ("1\N{NARROW NO-BREAK SPACE}234", "1234"),
    ("1'234", "1234"),
    ("1_000_000", "1000000"),
    ("12,34,567", "1234567"),
    (r"1{,}234", "1234"),
    ("3,14", "3.14"),
    ("0,125", "0.125"),
    ("1,2,3", "3"),
    ("(1,5)", "5"),
    (".5", "0.5"),
    ("It is 5.", "5"),
    # fractions and powers
    ("8/10", "4/5"),
    ("1 3/4", "7/4"),
    ("1½", "3/2"),
    (r"-\frac{3}{4}", "-3/4"),
    (r"\frac12", "1/2"),
    ("3/4/2024", "2024"),
    (r"2\frac{1}{2}", "5/2"),
    (r"\frac{1.5}{-2}", "-3/4"),
    ("_-5_", "-5"),
    ("x^2", "2"),
    ("1.5e-3", "0.0015"),
    ("1.5×10^3", "1500"),
    (r"2 \times 10^{-3}", "0.002"),
    ("10³", "1000"),
    ("2^10", "1024"),
    # no value that is certain
    ("version 1.2.3", None),
    ("5/0", None),
    ("1e999999999", None),
    ("9" * 5000, None),
]


@pytest.mark.parametrize(("text", "value"), WRITTEN)
def test_the_last_number_of_a_text(text: str, value: str | None) -> None:
    *_, last = numbers(plain(text))
    assert last.value == (None if value is None else Fraction(value))
    if value is not None:
        assert rewards.contained_number(text, {"answer": value}) == 1.0
        assert rewards.contained_number(text, {"answer": f"{value}1"}) == 0.0


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("100000000000000000001", "100000000000000000000", 0.0),
        ("The answer is −5", 5, 0.0),
        ("0.1", 0.1, 1.0),
        ("it grew by 50 %", "50%", 1.0),
        ("it grew by 50\\%", "50", 1.0),
        ("it grew by 50%", "0.5", 1.0),
        ("it grew by 50%", "5", 0.0),
        ("1e+22", 1e22, 1.0),
        ("none", "4", 0.0),
        ("The area is 12 cm^2.", "12", 1.0),
        (r"12\text{ cm}^2", "12", 1.0),
        ("It is 9.8 m/s^{2}", "9.8", 1.0),
        ("1.2.3", "1.2.3", 0.0),
    ],
)
def test_contained_number(completion: str, answer: Any, reward: float) -> None:
    assert rewards.contained_number(completion, {"answer": answer}) == reward


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("4", 4.0, 1.0),
        (" 4.00 ", 4, 1.0),
        ("−4", -4, 1.0),
        ("1,234", 1234, 1.0),
        ("4", Decimal("4.0"), 1.0),
        ("5", 4.0, 0.0),
        ("4 or so", 4.0, 0.0),
        ("4.0", "4", 0.0),
        ("−5", "-5", 1.0),
        ("cafe\N{COMBINING ACUTE ACCENT}", "Café", 1.0),
        ("true", True, 1.0),
        ("1", True, 0.0),
    ],
)
def test_exact_match(completion: str, answer: Any, reward: float) -> None:
    assert rewards.exact_match(completion, {"answer": answer}) == reward


@given(st.integers(-(10**30), 10**30), st.sampled_from(["{}", "{:,}", "{:_}"]), st.booleans())
def test_whole_numbers_come_back_as_they_are(number: int, form: str, minus: bool) -> None:
    text = form.format(number)
    *_, last = numbers(plain(f"so: {text.replace('-', '−') if minus else text}."))
    assert last.value == number


@given(st.text("1234567890.,-+/^e½{}\\ frac%x()'", max_size=60))
def test_no_text_is_too_odd(text: str) -> None:
    for each in numbers(plain(text)):
        assert 0 <= each.start < each.end <= len(text)
