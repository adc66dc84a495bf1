"""The score that a judge has written: what is certain of it, or nothing.

Judges write scales beside their score, fractions, marks around it, drafts before it, and scores of
parts. A number that may be read in two ways is no score: the judge is asked again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from earl_core.environments.rewards.written_numbers import Written, numbers, plain, whole_number

_MOST_CHARACTERS = 10_000
"""The end of a judge's answer, which is read."""
_MOST_BOXES = 16
_MOST = 10**9

_MARKS = r"[\s*_`\"'#|\\$]"
_SEPARATORS = r"=>|->|[:=：→⇒]"
_BRACKETS = r"\((?P<round>[^()\n]{0,40})\)|\[(?P<square>[^\[\]\n]{0,40})\]"
_STATEMENT = re.compile(
    rf"""
    (?P<element><(?:(?:final|total|overall)_)?(?:score|rating|grade)>)
  | (?<![^\W_]) (?P<noun>score|rating|grade)s? (?![^\W_]|_[^\W_])
    (?P<between>
        (?:{_MARKS}|{_BRACKETS}(?P<bracket>))*
        (?:(?:out[ ]of|on[ ]a[ ]scale[ ](?:of|from)|from|between)[ ]\d[\d.,]*
           (?:[ ]?(?:-|to|and)[ ]?\d[\d.,]*)?[\s*]*)?
        (?:(?:for|of)[ ](?:this|the|your|its)[ ][^\W\d]+(?:[ ][^\W\d]+)?[\s*]*(?=[:=]|is\b))?
    )
    (?P<said>(?:(?:is|was)\s?)?(?:{_SEPARATORS})|(?<=\s)-(?=\s)|—|(?:is|was|of|equals|it|this|at|an?)\b)?
    """,
    re.VERBOSE | re.IGNORECASE,
)
_LABEL = re.compile(r"(?:(?<![^\W_])[^\W\d_]+(?:['’][^\W\d_]+)?[ \t_*-]{1,4}){1,3}$")
_LEAD = re.compile(
    r"(?:\\boxed\s?\{|\\(?![dt]?frac|boxed)|[\s*_`\"'#|$]|[({\[<]|(?:an?|is|now|about|around|approximately|exactly|solid|strong|"
    r"be|of|of:)\b|~(?!~))*",
    re.IGNORECASE,
)
_COUNTED = (
    r"(?:errors?|mistakes?|flaws?|issues?|problems?|steps?|facts?|items?|tests?|cases?|bugs?|"
    r"questions?|requirements?|criteria)"
)
"""Words behind a number that counts something else."""
_SIGNS_OF_DOUBT = re.compile(
    rf"""
    [ \t*_`~)\]}}]{{0,40}}(?:
        (?:[-+±<>→×x*=/~&|:·'’…,]|->|\.\.+|\b(?:to|or|and|vs\.?|versus|minus|plus)\b|;(?=\d)
          |[ \t](?=\.))
        [ \t*_`~]{{0,40}}[-+]?\.?[\d½]
      | [+±]
      | \d
      | (?<=\s)(?:\w+[ ])?{_COUNTED}\b
      | [ \t,;(]{{0,40}}(?:(?:but|then)[ ])?(?:i[ ])?
        (?:(?:(?:minus|less|or|maybe|deduct(?:ed|ing)?|reduced|lowered|raised)\b[^\n\d]{{0,20}}\d)
           |(?:if|would|when|unless)\b)
      | [ \t]?\(-[ ]?\d
      | \?[^\n\d]{{0,80}}\d
    ) | [^\W\d]
    """,
    re.VERBOSE | re.IGNORECASE,
)
_LISTED = re.compile(r"[.)][ \t]+\w[^\0]{0,2000}?\n\s*2[.)]")
_SCALE = re.compile(
    r"[ \t*_]{0,9}[(\[]([^()\[\]\n]{0,40}(?:scale|range|max)[^()\[\]\n]{0,40})[)\]]", re.I
)
_CLOSES = re.compile(r"</\w*$")
_NUMERAL = re.compile(r"[-+.\d\\$€£¥₹¼-¾⅐-⅞]")
_OVER = re.compile(
    r"[\s*_`)\]}]{0,40}[(\[]?\s{0,9}(?:/[\s*_`]{0,9}|(?:out\s+of|of|von|sur|de)[\s*_`]+)(?:an?\s+|the\s+)?(?:possible\s+|total\s+"
    r"|maximum\s+)?(?P<over>\d[\d.,]*)(?<![.,])|[\s*_`)\]}]{0,40}[(\[]\s{0,9}/\s{0,9}(?P<over_mark>\d+)",
    re.IGNORECASE,
)
_UNITS = re.compile(r"\s?(?:points?|pts?|stars?|分|点)(?![^\W_])", re.IGNORECASE)
_LAST = re.compile(r"final|overall|total|aggregate|combined")
_PLAIN = re.compile(
    r"the|my|an?|your|this|its|judge's|and|so|thus|therefore|hence|is|with|of|it|give|i|assign"
)
_LIMITS = re.compile(
    r"max|maximum|min|minimum|highest|lowest|best|worst|possible|perfect|full|top|average|mean|"
    r"passing|previous|old|expected|target|per|threshold|baseline|start|starting|initial|base|original|"
    r"first|preliminary|tentative|draft"
)
_WEAK_DOUBT = re.compile(
    r"\b(?:would|could|should|might|may|if|unless|not|no|never|cannot|than|least|most|means|when|"
    r"reserved?|requires?|needs?|deserves|to get|instead|almost|too|considered|"
    r"considering|thought|initially|between)\b|n't",
    re.IGNORECASE,
)
_OF_ANOTHER = re.compile(
    r"\b(?:student|solution|response|expected|correct|reference|candidate|their|its|gives?|gave)\b",
    re.IGNORECASE,
)
_I_WOULD = re.compile(r"\b(i|we)(?:['’]d| would) (?=give|rate|assign|score)", re.IGNORECASE)


@dataclass(frozen=True)
class _Said:
    """One statement. rank: how surely it is the verdict. label: of what it is the score. value:
    None where it cannot be read."""

    rank: int
    label: str
    value: Fraction | None


def read_score(text: str, low: float, high: float) -> float | None:
    r"""The score in a judge's answer, or None where there is none that is certain.

    A score is what follows the word score, rating or grade, stands in `<score>`, or is the whole
    answer or the `\boxed{}` at its end. The last of several drafts counts; a final or overall score
    outranks others; scores of several parts that differ are none. `8/10`, and 80 % on a scale up to
    100, must fit low and high.
    """
    text = _I_WOULD.sub(r"\1 ", plain(text[-_MOST_CHARACTERS:].rpartition("</think>")[2]))
    said = list(_statements(text, low, high))
    if not said:
        return _alone(text, low, high)
    best = max(each.rank for each in said)
    chosen = [each for each in said if each.rank == best]
    if best > 1 and len({each.label for each in chosen}) == 1:
        chosen = chosen[-1:]
    values = {each.value for each in chosen}
    value = values.pop()
    return None if values or value is None else float(value)


def _alone(text: str, low: float, high: float) -> float | None:
    """The number that is all of a text, or that ends it in a box of LaTeX which is the judge's."""
    boxes = list(re.finditer(r"\\boxed\s?\{", text))
    if len(boxes) > _MOST_BOXES:
        return None
    found = _number_at(text, boxes[-1].start() if boxes else 0, low, high)
    if found is None or found[0] is None or text[found[1] :].strip(" \n\t*_`.}$)]"):
        return None
    others = {_number_at(text, box.start(), low, high) is None for box in boxes}
    values = {read[0] for box in boxes if (read := _number_at(text, box.start(), low, high))}
    quoted = boxes and _OF_ANOTHER.search(_sentence(text, boxes[-1].start(), boxes[-1].end()))
    return None if True in others or len(values) > 1 or quoted else float(found[0])


def _statements(text: str, low: float, high: float) -> Iterator[_Said]:
    for found in _STATEMENT.finditer(text):
        label = _LABEL.search(text[max(0, found.start() - 60) : found.start()].lower())
        words = re.findall(r"[^\W\d_]+(?:['’][^\W\d_]+)?", label[0]) if label else []
        closes = _CLOSES.search(text[max(0, found.start() - 20) : found.start()])
        if closes or any(map(_LIMITS.fullmatch, words[-2:])):
            continue
        bracket = found["round"] or found["square"]
        value = None
        if _fits(bracket, found["between"], high):
            read = _number_at(text, found.end(), low, high)
            if read is None and found["noun"] and found["noun"].lower() != "score":
                continue  # in words: good, B
            value = None if read is None else read[0]
            inner = None if found["said"] or not bracket else _bracketed(bracket, low, high)
            if inner is not None:
                # Of two numbers on one line, either may be the scale's end.
                value = (
                    inner if read is None or "\n" in text[found.end("bracket") : read[1]] else None
                )
        marked = found["said"] is not None and not found["said"][-1].isalpha()
        last = any(map(_LAST.fullmatch, words))
        noun = (found["noun"] or "score").lower()
        if found["element"] or (last and (marked or not found["said"])):
            yield _Said(3, noun, value)
        elif marked or last:
            if found["said"] == "-" and low < 0:
                value = None
            parts = [
                each for each in words if not _PLAIN.fullmatch(each) and not _LAST.fullmatch(each)
            ]
            yield _Said(1 if parts else 2, " ".join([*parts, noun]), value)
        elif value is not None:
            sentence = _sentence(text, found.start(), found.end())
            yield _Said(1, "", None if _WEAK_DOUBT.search(sentence) else value)


def _sentence(text: str, start: int, end: int) -> str:
    """Return the text around a place, between full stops and ends of lines."""
    before = re.split(r"[.!?]\s|\n", text[max(0, start - 200) : start])[-1]
    after = re.split(r"[.!?](?:\s|$)|\n", text[start : end + 200])[0]
    return before + after


def _fits(bracket: str | None, between: str | None, high: float) -> bool:
    """Tell whether the scale that a judge names beside the word ends where ours does."""
    named = f"{bracket or ''} {between or ''}"
    limits = [each for each in numbers(named) if each.value is not None]
    only = bracket is not None and whole_number(bracket) is not None
    return not limits or limits[-1].value == Fraction(high) or limits[-1].over == high or only


def _bracketed(bracket: str, low: float, high: float) -> Fraction | None:
    read = _number_at(bracket, 0, low, high)
    return read[0] if read is not None and not bracket[read[1] :].strip() else None


def _number_at(
    text: str, start: int, low: float, high: float
) -> tuple[Fraction | None, int] | None:
    """The number that stands there behind nothing but marks, and where it ends; None: none does."""
    lead = _LEAD.match(text, start)
    begin = lead.end() if lead else start
    if not _NUMERAL.match(text, begin):
        return None
    found = next(numbers(text[begin : begin + 1200]), None)
    if found is None or found.start != 0:
        return None
    before = text[begin - 1 : begin]
    below = text[start:begin].rstrip(" \t*_`").endswith("<")
    if below and not text[begin + found.end :].lstrip(" \t*_`").startswith(">"):
        return None
    if text[begin] in "+-" and before and before not in " \t\n*_`\"'$|({[<:=>—→⇒：":
        return None
    end = begin + found.end
    listed = found.value == 1 and "\n" in text[start:begin] and _LISTED.match(text, end)
    several = before and before in "([{" and "," in text[begin:end]
    if listed or several or (found.value is not None and abs(found.value) > _MOST):
        return None, end
    return _on_scale(found, text, begin, end, low, high)


def _on_scale(
    found: Written, text: str, begin: int, end: int, low: float, high: float
) -> tuple[Fraction | None, int]:
    value, over = found.value, found.over
    if value is None or found.doubtful:
        return None, end
    if unit := _UNITS.match(text, end):
        end = unit.end()
    if over is None and (behind := _OVER.match(text, end)):
        named = whole_number(behind["over"] or behind["over_mark"])
        over = None if named is None else named.value
        if over is None:
            return None, end
        value, end = value / over if over else None, behind.end()
    if value is None or _SIGNS_OF_DOUBT.match(text, end):
        return None, end
    if (scale := _SCALE.match(text, end)) and not _fits(scale[1], None, high):
        return None, end
    if over is not None:
        if over == Fraction(high):
            value *= over
        elif high != 1:
            return None, end
    elif found.percent:
        if high not in (1, 100):
            return None, end
        value = value / 100 if high == 1 else value
    return value, end
