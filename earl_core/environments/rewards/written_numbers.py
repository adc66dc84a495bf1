"""The numbers that a text holds, as people, models and LaTeX write them, read exactly.

They use the standard library alone, because reward functions may run under a Python without our
packages. A text whose value is not certain (a version, a chain of slashes) has none here.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

_MOST_DIGITS = 1000
_MOST_EXPONENT = 1000

# Minus signs, and the dashes that are typed for them; the long dashes are punctuation.
_MINUS = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d\u02d7\u207b"), "-")
_SAME: dict[int, str | int | None] = {
    **_MINUS,
    **str.maketrans("＋．，％／⁄∕٪٫٬", "+.,%///%.\u2009"),
    **{code: str(code - 0xFF10) for code in range(0xFF10, 0xFF1A)},
}
_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺", "0123456789+")

_SEPARATOR = r"(?:[.,'’_\u00a0\u2009\u202f]|\{,\}|\\[,!;])"
_RUN = rf"(?:(?<![\w.])\.)?\d+(?:{_SEPARATOR}\d+)*"
_VULGAR = "¼-¾⅐-⅞"
_NUMBER = re.compile(
    rf"""
    (?P<sign>(?<![^\W_])(?<![.)\]}}%+\-])[+-](?=\\?[$€£¥₹]?(?:[.\d{_VULGAR}]|\\[dt]?frac)))?
    (?:\\?[$€£¥₹])?
    (?:
        (?:(?P<whole>\d{{1,9}})[ ]?)?
        \\[cdt]?frac\s*(?:\{{\s*(?P<top>-?{_RUN})\s*\}}\s*\{{\s*(?P<bottom>-?{_RUN})\s*\}}|(?P<short>\d\d))
      | (?:(?P<run>{_RUN})[ ]?)?(?P<vulgar>[{_VULGAR}])
      | (?:(?P<mixed>\d{{1,9}})[ ](?=\d{{1,9}}/\d{{1,9}}(?![\d/]|[.,]\d)))?
        (?P<plain>{_RUN})
        (?:
            [eE](?P<exponent>[+-]?\d+)(?!\w)
          | (?:\s?(?:[×x*·]|\\times|\\cdot)\s?10)
            (?:\s?\^\s?(?:\{{\s?(?P<ten>[+-]?\d+)\s?\}}|(?P<ten_bare>[+-]?\d+))|(?P<ten_up>[-⁺]?[⁰¹²³⁴-⁹]+))
          | \s?\^\s?(?:\{{\s?(?P<power>[+-]?\d+)\s?\}}|(?P<power_bare>[+-]?\d+))
          | (?P<power_up>-?[⁰¹²³⁴-⁹]+)
        )?
        (?:\s?/\s?(?P<over>{_RUN}))?
    )
    (?P<percent>\s?\\?%|\s?per\s?cent\b)?
    """,
    re.VERBOSE,
)


@dataclass(frozen=True)
class Written:
    """One of a text. value: None where it is not certain; of a percentage, as it is written.

    start, end: where it stands in `plain(text)`. over: the divisor, where it is written as a
        fraction. doubtful: whether its comma may be a decimal one or one of thousands.
    """

    value: Fraction | None
    start: int
    end: int
    percent: bool = False
    over: Fraction | None = None
    doubtful: bool = False

    def equals(self, other: Written) -> bool:
        """Tell whether both are equal; a percentage also equals its number without the sign."""
        if self.value is None or other.value is None:
            return False
        if self.value == other.value:
            return True
        of_one = self.value / 100 if self.percent else self.value
        of_other = other.value / 100 if other.percent else other.value
        return of_one == of_other


def plain(text: str) -> str:
    """The text with one character for each minus sign, digit and separator that looks alike."""
    return text.translate(_SAME)


def numbers(text: str) -> Iterator[Written]:
    """All of a text, in their order. text: as `plain` returns it.

    A hyphen after a digit, a letter or a closing bracket is no sign. `1,234` is a thousand, `1,5`
    and `0,125` have decimal commas, `1,2,3` and `(1,5)` are several numbers.
    """
    for found in _NUMBER.finditer(text):
        start, end = found.span()
        run = found["plain"]
        chained = text[start - 1 : start] == "/" or re.match(r"/\d", text[end : end + 2])
        if found["over"] and chained:
            # A date: what stands last counts, as in a list.
            yield Written(_value(found["over"])[0], found.start("over"), end)
            continue
        pieces = _pieces(run, text[start - 1 : start] + text[end : end + 1]) if run else []
        if len(pieces) > 1:
            for piece in pieces:
                yield Written(_value(piece)[0], start, end, bool(found["percent"]))
            continue
        yield _number(found, start, end)


def whole_number(text: str) -> Written | None:
    """The number that the text is, apart from white space around it."""
    text = plain(text).strip()
    read = list(numbers(text))
    if (
        len(read) == 1
        and read[0].value is not None
        and (read[0].start, read[0].end) == (0, len(text))
    ):
        return read[0]
    return None


def _number(found: re.Match[str], start: int, end: int) -> Written:
    value: Fraction | None
    over, doubtful = None, False
    if found["top"] or found["short"]:
        over = _signed(found["bottom"] or found["short"][1])
        value = _over(_signed(found["top"] or found["short"][0]), over)
        if found["whole"] and value is not None:
            # Digits of something else, such as an exponent, where no part of one follows.
            value = int(found["whole"]) + value if 0 < value < 1 else value
    elif found["vulgar"]:
        before = _value(found["run"])[0] if found["run"] else Fraction(0)
        part = Fraction(unicodedata.numeric(found["vulgar"])).limit_denominator(10)
        value = None if before is None else before + part
    else:
        value, doubtful = _value(found["plain"])
        value = _scaled(found, value)
        if found["over"]:
            over, doubtful_too = _value(found["over"])
            value, doubtful = _over(value, over), doubtful or doubtful_too
        if found["mixed"] and value is not None:
            before = _value(found["mixed"])[0]
            value = None if before is None or value >= 1 else before + value
    if value is not None and found["sign"] == "-":
        value = -value
    return Written(value, start, end, bool(found["percent"]), over, doubtful)


def _signed(run: str) -> Fraction | None:
    value = _value(run.removeprefix("-"))[0]
    return -value if value is not None and run[0] == "-" else value


def _over(top: Fraction | None, bottom: Fraction | None) -> Fraction | None:
    return top / bottom if top is not None and bottom else None


def _scaled(found: re.Match[str], value: Fraction | None) -> Fraction | None:
    """The value with its power of ten, or its own power."""
    ten = found["exponent"] or found["ten"] or found["ten_bare"] or found["ten_up"]
    power = found["power"] or found["power_bare"] or found["power_up"]
    given = ten or power
    if value is None or given is None:
        return value
    exponent = int(given.translate(_SUPERSCRIPT)) if len(given) < 6 else _MOST_EXPONENT + 1
    base = Fraction(10) if ten else value
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) > _MOST_EXPONENT or size * abs(exponent) > 10 * _MOST_EXPONENT:
        return None
    if not base and exponent < 0:
        return None
    return value * base**exponent if ten else base**exponent


def _parts(run: str) -> tuple[list[str], list[str]]:
    """The groups of digits, and what separates them; thin spaces of LaTeX are one character."""
    run = re.sub(r"\{,\}|\\[,!;]", "\u2009", run)
    return re.split(r"\D", run), re.findall(r"\D", run)


def _pieces(run: str, around: str) -> list[str]:
    """The numbers of a run: one, or those of a list that has no spaces. around: it."""
    groups, separators = _parts(run)
    kinds = set(separators)
    if not run[0].isdigit() or len(kinds) != 1 or "." in kinds:
        return [run]
    if kinds == {","}:
        pair = len(groups) == 2 and around in ("()", "[]", "{}")
        listed = len(groups) > 2 and not _grouped(groups, ",")
        return groups if listed or (pair and not _grouped(groups, ",")) else [run]
    return [run] if _grouped(groups, separators[0]) else groups


def _grouped(groups: list[str], separator: str) -> bool:
    """Tell whether these are thousands, or lakhs and crores."""
    if separator == "_":
        return True
    first, *middle, last = groups
    if not 1 <= len(first) <= 3 or first[0] == "0" or len(last) != 3:
        return False
    by_three = all(len(each) == 3 for each in middle)
    by_two = separator == "," and len(first) <= 2 and all(len(each) == 2 for each in middle)
    return by_three or (bool(middle) and by_two)


def _value(run: str) -> tuple[Fraction | None, bool]:
    """Read digits and separators; also tell whether its one comma may be read in two ways."""
    groups, separators = _parts(run)
    if sum(map(len, groups)) > _MOST_DIGITS:
        return None, False
    if not separators:
        return Fraction(int(run)), False
    *before, last = separators
    if not before and last == ".":
        return _decimal(groups), False
    if len(set(separators)) == 1 and _grouped(groups, last):
        return Fraction(int("".join(groups))), not before and last == ","
    if not before and last == ",":
        return _decimal(groups), False
    alike = len(set(before)) == 1 and before[0] != last and _grouped(groups[:-1], before[0])
    if last in ".," and alike:
        return _decimal(["".join(groups[:-1]), groups[-1]]), False
    return None, False


def _decimal(groups: list[str]) -> Fraction:
    whole, behind = groups
    return Fraction(int(whole + behind), 10 ** len(behind))
