"""Rewards that compare the answer with a gold answer: as text, as a number, as a choice."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from postgrad.rewards.base import RolloutView, reward
from postgrad.rewards.library.answer import answer_part, marked_segments, plain
from postgrad.rewards.library.numbers import answered_number, gold_number

_ALONE = re.compile(r"(?<![\w'’])([A-Za-z])(?![\w'’])")
_BRACKETED = re.compile(r"[(\[]([A-Za-z])[)\]]")
_ONLY_LETTERS = re.compile(r"(?:[\W_]|\b[A-Za-z]\b|\bor\b|\band\b|\boption\b|\bchoice\b|\\text\b)+", re.IGNORECASE)
_FIRST = re.compile(r"[\W_]*(?:(?:option|choice|letter)\s+)?[*_]*([A-Za-z])(?:[*_]*[).:,\]]|[*_]*\s*\n|\s+[-–—]\s)", re.IGNORECASE)


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
    gold = plain(str(answer)) if answer is not None else ""
    return None if not gold else float(plain(answer_part(rollout.final_answer)) == gold)


@reward(scope="final", claim="the final answer names the gold choice and no other", range=(0.0, 1.0), role="outcome")
def choice_match(rollout: RolloutView, answer: Any) -> float | None:
    """1 when the answer commits to the gold letter. Abstains when the gold is no single letter, e.g. an index.

    Read are the letter that an answer starts with ("B", "B) Paris") and letters in brackets, of what follows a marker ("the answer is B",
    `\\boxed{B}`) where there is one. Two different letters are no commitment.
    """
    gold = re.fullmatch(r"\W*([A-Za-z])\W*", str(answer)) if answer is not None else None
    if gold is None:
        return None
    return float(chosen_letters(answer_part(rollout.final_answer)) == {gold[1].upper()})


def chosen_letters(text: str) -> set[str]:
    """The letters that the text commits to.

    >>> sorted(chosen_letters("The answer is (B).")), sorted(chosen_letters("A or B")), sorted(chosen_letters("A dog"))
    (['B'], ['A', 'B'], [])
    """
    return {letter.upper() for segment in marked_segments(text) or [text] for letter in _letters(segment)}


def _letters(segment: str) -> set[str]:
    """All of them when there is nothing but letters; else those in brackets and the one that the segment starts with."""
    if _ONLY_LETTERS.fullmatch(segment):
        return set(_ALONE.findall(segment))
    first = _FIRST.match(segment)
    return {*_BRACKETED.findall(segment), *([first[1]] if first else [])}
