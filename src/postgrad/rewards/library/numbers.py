"""Numbers in a text, and the one number that an answer commits to."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from itertools import pairwise
from typing import Any

from postgrad.rewards.library.answer import answer_part, marked_segments

_NUMBER = re.compile(
    r"(?<![\w.])(?:(?<![\d)])[-−])?\$?"  # a minus between two numbers is an operator, not a sign
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
    r"(?:[eE][+-]?\d{1,3}(?!\w))?(?:/\d+(?![\d/]))?"
)
_LONGEST_NUMBER = 60
_FRACTION = re.compile(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_LISTED = re.compile(r"(?:\s|[,;|/]|\bor\b|\band\b)*", re.IGNORECASE)
_COMPUTED = re.compile(r"(?:\s|[-−+*^×÷x{}()]|\\times|\\cdot)*")


def numbers_in(text: str) -> list[Decimal]:
    """Every number in the text, in order: `1,234`, `-3.5`, `$12`, `1e3`, `3/4`. A number of over 60 characters is NaN, equal to none.

    >>> [str(n) for n in numbers_in("$1,234.50 of 3/4, then 10-4")]
    ['1234.50', '0.75', '10', '4']
    """
    return [_decimal(match.group()) for match in _NUMBER.finditer(text)]


def _decimal(text: str) -> Decimal:
    if len(text) > _LONGEST_NUMBER:
        return Decimal("NaN")
    above, _, below = text.replace(",", "").replace("$", "").replace("−", "-").partition("/")
    try:
        return Decimal(above) / Decimal(below) if below else Decimal(above)
    except (InvalidOperation, ZeroDivisionError):
        return Decimal("NaN")


def gold_number(gold: Any) -> Decimal | None:
    """The number a dataset's answer means: what follows `####`, or its only number. None when there is not exactly one.

    >>> gold_number("6 * 7 = 42 #### 42"), gold_number("42 apples"), gold_number("3 or 4")
    (Decimal('42'), Decimal('42'), None)
    """
    found = {number for number in numbers_in(str(gold).rpartition("####")[2]) if not number.is_nan()}
    return found.pop() if len(found) == 1 else None


def answered_number(text: str) -> Decimal | None:
    """The one number that the text commits to, or None when it commits to none or to several.

    After an explicit marker (`\\boxed{…}`, `####`, `<answer>`, "the answer is") every number of that line counts, but only what
    follows the last `=`; two different ones are no commitment, nor is a calculation that is left to the reader.
    Without a marker it is the last number, unless the text ends in a list or a calculation.

    >>> answered_number("6 * 7 = 42"), answered_number("the answer is 41 or 42"), answered_number("6 * 7")
    (Decimal('42'), None, None)
    """
    text = _FRACTION.sub(r"\1/\2", answer_part(text))
    if segments := marked_segments(text):
        candidates = [number for segment in segments for number in _committed(segment.rpartition("=")[2])]
        return candidates[0] if candidates and all(number == candidates[0] for number in candidates) else None
    last_two = list(_NUMBER.finditer(text))[-2:]
    if not last_two:
        return None
    if len(last_two) == 2 and (_operation(text, *last_two) or _listed(text, *last_two)):
        return None
    return _decimal(last_two[-1].group())


def _committed(segment: str) -> list[Decimal]:
    """The numbers of a marked segment; NaN, which equals nothing, when it is a calculation."""
    matches = list(_NUMBER.finditer(segment))
    if any(_operation(segment, *pair) for pair in pairwise(matches)):
        return [Decimal("NaN")]
    return [_decimal(match.group()) for match in matches]


def _operation(text: str, left: re.Match[str], right: re.Match[str]) -> bool:
    between = text[left.end() : right.start()]
    return bool(between.strip()) and _COMPUTED.fullmatch(between) is not None


def _listed(text: str, left: re.Match[str], right: re.Match[str]) -> bool:
    return _LISTED.fullmatch(text, left.end(), right.start()) is not None and _decimal(left.group()) != _decimal(right.group())


def is_calculation(text: str) -> bool:
    """Whether two numbers in the text have only operators between them: a result left to the reader.

    >>> is_calculation("6 * 7"), is_calculation("2**3"), is_calculation("-3/4"), is_calculation("2y + 3")
    (True, True, False, False)
    """
    return any(_operation(text, *pair) for pair in pairwise(_NUMBER.finditer(text)))
