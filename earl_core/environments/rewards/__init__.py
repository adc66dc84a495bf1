"""Reward functions for the prompt environment.

A reward function is called as `function(completion, row)` and returns a float, or a float and a
dict: its numbers become metrics, its `outcome` (str) is counted. `row` is the data set's row as a
dict; `row["answer"]` is the value of the configured answer column. With a third argument,
`messages`, it gets the answers with calls of tools and the tools' results.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any, TypeVar

from earl_core.environments.base import Message
from earl_core.environments.rewards.usable_rows import AnswerRule, text_or_number
from earl_core.environments.rewards.written_numbers import Written, numbers, plain, whole_number

Function = TypeVar("Function", bound=Callable[..., Any])


def giving(low: float, high: float) -> Callable[[Function], Function]:
    """Declare the least and the greatest reward of a function; the guard tells of others."""

    def declared(function: Function) -> Function:
        vars(function)["reward_range"] = (low, high)
        return function

    return declared


@giving(0.0, 1.0)
def exact_match(completion: str, row: dict[str, Any]) -> float:
    """1 when the completion equals the answer, apart from case and surrounding space, else 0. An
    answer that is a number, and no text, equals the number that the completion is: 4.0 is `4`."""
    answer = _answer(row)
    if isinstance(answer, Number) and not isinstance(answer, bool):
        given, wanted = whole_number(completion), whole_number(str(answer))
        return float(given is not None and wanted is not None and given.equals(wanted))
    return float(_compared(completion) == _compared(str(answer)))


@giving(0.0, 1.0)
def contained_number(completion: str, row: dict[str, Any]) -> float:
    """1 when the last number in the completion equals the last number in the answer, else 0.

    They are compared exactly. Understands what `written_numbers` does: minus signs of all kinds,
    decimals, thousands separators, fractions, powers of ten, LaTeX; `10-5` ends with 5. `50%`
    equals 50 and 0.5.
    """
    given, wanted = _last_number(completion), _last_number(str(_answer(row)))
    return float(given is not None and wanted is not None and given.equals(wanted))


def number_by_tools(
    completion: str, row: dict[str, Any], messages: Sequence[Message]
) -> tuple[float, dict[str, Any]]:
    """Score as `contained_number`, but 0.1 for a wrong number after an answered call of a tool."""
    right = contained_number(completion, row)
    results = [message["content"] for message in messages if message["role"] == "tool"]
    called = any(not result.startswith("Error: ") for result in results)
    return right or 0.1 * called, {"correct": right, "called": float(called)}


def _holds_number(answer: Any) -> str:
    wrong = f"is {answer}" if isinstance(answer, bool) else text_or_number(answer)
    if wrong or not isinstance(answer, str):
        return wrong
    return "" if re.search(r"[\d¼-¾⅐-⅞]", answer) else "holds no number"


_END = 4000
"""Characters of a completion, which mostly hold its last number."""
_EXPONENT_OF_UNIT = re.compile(
    r"\d[\s~]{0,3}(?:\\[,;!: ])?\s?(?:\\(?:text|mathrm|mbox|rm)\s?\{\s?)?"
    r"(?:[A-Za-zµμ]+\s?[/*·]\s?)?(?:[kcdmnµμ]?m|ft|feet|in|inch(?:es)?|yd|mi|s|sec|units?|met(?:er|re)s?)\}?\s?\^\s?\{?\s?$"
)
"""Text before the 2 of `12 cm^2`."""


def nothing(completion: str, row: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """0, for prompts without an answer: the functions of the section `reward` score them."""
    return 0.0, {"outcome": "answered"}


ANSWER_RULES: dict[Any, AnswerRule] = {
    exact_match: text_or_number,
    contained_number: _holds_number,
    number_by_tools: _holds_number,
}
"""Rules for the answers that these functions need; with any other their score is always 0."""


def _answer(row: dict[str, Any]) -> Any:
    if "answer" not in row:
        raise KeyError("the row has no answer: set the environment's answer_column")
    return row["answer"]


def _compared(text: str) -> str:
    """Letters with accents, and minus signs, may be written in several ways."""
    same = unicodedata.normalize("NFC", text.strip().casefold())
    return re.sub("[\u2212\ufe63\uff0d]", "-", same)


def _last_number(text: str) -> Written | None:
    text = plain(text)
    # Of two numbers the last one is whole, however the text before is cut.
    return _last_of(text[-_END:], 2) or _last_of(text, 1)


def _last_of(text: str, least: int) -> Written | None:
    """The last number where there are at least so many that are no exponents of units."""
    found = list(numbers(text))
    while len(found) > 1 and _EXPONENT_OF_UNIT.search(
        text, max(0, found[-1].start - 60), found[-1].start
    ):
        found.pop()
    return found[-1] if len(found) >= least else None
