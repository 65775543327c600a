"""The rewards that ship: `use: NAME` in a recipe. Each is a plain function with a truth table in its tests.

exact_match · numeric_match · tool_use · think_format · soft_overlong · repetition
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from itertools import pairwise
from typing import Any

from postgrad.rewards.base import RolloutView, reward

_NUMBER = re.compile(
    r"(?<![\w.])(?:(?<![\d)])[-−])?\$?"  # a minus between two numbers is an operator, not a sign
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
    r"(?:[eE][+-]?\d{1,3}(?!\w))?(?:/\d+(?![\d/]))?"
)
_LONGEST_NUMBER = 60
_FRACTION = re.compile(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_MARKER = re.compile(r"\\boxed\s*\{|####\s*(?=[-−$.\d])|<answer>|\banswer\s*(?:is|:|=)", re.IGNORECASE)
_REASON = re.compile(r"\b(?:because|since|which|where)\b", re.IGNORECASE)
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
    if markers := list(_MARKER.finditer(text)):
        ends = [*(marker.start() for marker in markers[1:]), len(text)]
        marked = [_marked(marker, text[marker.end() : end]) for marker, end in zip(markers, ends, strict=True)]
        candidates = [number for segment in marked for number in _committed(segment)]
        return candidates[0] if candidates and all(number == candidates[0] for number in candidates) else None
    last_two = list(_NUMBER.finditer(text))[-2:]
    if not last_two:
        return None
    if len(last_two) == 2 and (_operation(text, *last_two) or _listed(text, *last_two)):
        return None
    return _decimal(last_two[-1].group())


def answer_part(text: str) -> str:
    """The text after the thinking; empty when the thinking never ends."""
    rest = text.rpartition("</think>")[2]
    return "" if "<think>" in rest else rest


def _marked(marker: re.Match[str], rest: str) -> str:
    """What the marker marks of the text up to the next marker: up to its closing bracket or tag, or to the end of the line or of the
    reason given for it."""
    if marker.group().endswith("{"):
        return _bracketed(rest).rpartition("=")[2]
    if marker.group().lower() == "<answer>":
        return re.split(r"</answer>", rest, maxsplit=1, flags=re.IGNORECASE)[0].rpartition("=")[2]
    line = _REASON.split(rest.lstrip().partition("\n")[0], maxsplit=1)[0]
    return line.rpartition("=")[2]


def _bracketed(text: str) -> str:
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:index]
    return text


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


@reward(scope="final", claim="the final answer equals the gold number", range=(0.0, 1.0), role="outcome")
def numeric_match(rollout: RolloutView, answer: Any) -> float | None:
    """1 when the last assistant message commits to the gold number, 0 when not; abstains when the gold holds no single number.

    Listing candidates, contradicting oneself after a marker, and a number that only a tool returned are wrong.
    """
    gold = gold_number(answer)
    if gold is None:
        return None
    given = answered_number(rollout.final_answer)
    tolerance = Decimal(0) if gold == gold.to_integral_value() else Decimal("1e-6") * abs(gold)
    return float(given is not None and not given.is_nan() and abs(given - gold) <= tolerance)


@reward(scope="final", claim="the final answer is the gold text", range=(0.0, 1.0), role="outcome")
def exact_match(rollout: RolloutView, answer: Any) -> float | None:
    """1 when the last assistant message, without the thinking before it, is the gold text (white space and case aside)."""
    gold = _plain(str(answer)) if answer is not None else ""
    return None if not gold else float(_plain(answer_part(rollout.final_answer)) == gold)


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


@reward(scope="tool_calls", claim="a tool was called successfully", range=(0.0, 1.0))
def tool_use(rollout: RolloutView) -> float:
    """1 when at least one call was executed without an error. More calls earn nothing more."""
    return float(any(result.call is not None and not result.error for result in rollout.tool_results))


@reward(scope="reasoning", claim="the last message thinks once and then answers", range=(0.0, 1.0))
def think_format(rollout: RolloutView) -> float:
    """1 when the last message is one non-empty <think>…</think> followed by a non-empty answer, with no other think tag."""
    message = rollout.messages[-1] if rollout.messages else None
    if message is None or message.role != "assistant":
        return 0.0
    if message.reasoning:
        clean = not re.search(r"</?think>", message.reasoning + message.content)
        return float(clean and bool(message.reasoning.strip()) and bool(message.content.strip()))
    opened, closed = message.content.count("<think>"), message.content.count("</think>")
    before, _, rest = message.content.partition("<think>")
    thought, _, answer = rest.partition("</think>")
    return float(opened == closed == 1 and not before.strip() and bool(thought.strip()) and bool(answer.strip()))


def _check_overlong(max_tokens: int | None = None, buffer: int = 0) -> None:
    if max_tokens is None:
        raise ValueError("needs args: {max_tokens: …}")
    if not 0 <= buffer <= max_tokens:
        raise ValueError(f"needs 0 ≤ buffer ≤ max_tokens, got buffer {buffer} and max_tokens {max_tokens}")


@reward(scope="length", claim="the model wrote no more than the length allows", range=(-1.0, 0.0), check_args=_check_overlong)
def soft_overlong(rollout: RolloutView, *, max_tokens: int, buffer: int = 0) -> float:
    """0 up to max_tokens − buffer sampled tokens, then falling linearly to −1 at max_tokens (DAPO's soft overlong punishment).

    Tool results do not count: the model did not write them.
    """
    over = rollout.sampled_tokens - (max_tokens - buffer)
    if over <= 0:
        return 0.0
    return -1.0 if over >= buffer else -over / buffer


def _check_repetition(ngram: int = 3) -> None:
    if ngram < 1:
        raise ValueError(f"needs ngram ≥ 1, got {ngram}")


@reward(scope="length", claim="the model does not repeat itself", range=(-1.0, 0.0), check_args=_check_repetition)
def repetition(rollout: RolloutView, *, ngram: int = 3) -> float:
    """−(share of the sampled n-grams of tokens that occurred before). Counts tokens, so text without spaces does not hide a loop."""
    ids = rollout.sampled_ids
    total = len(ids) - ngram + 1
    if total <= 0:
        return 0.0
    return len({ids[i : i + ngram] for i in range(total)}) / total - 1.0


LIBRARY: Mapping[str, Callable[..., Any]] = {
    function.__name__: function for function in (exact_match, numeric_match, tool_use, think_format, soft_overlong, repetition)
}
