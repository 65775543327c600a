"""The outcome of mathematics: an expression equal to the gold one. Compared by math-verify (`pip install postgrad[math]`)."""

from __future__ import annotations

import logging
import re
from typing import Any

from postgrad.rewards.base import RolloutView, reward
from postgrad.rewards.library.answer import answer_part, bracketed, marked_segments
from postgrad.rewards.library.numbers import answered_number, is_calculation

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MATH = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_EXPLOSIVE = re.compile(r"(?:\^|\*\*)\s*[{(]*\s*(?:\d{5,}|[^{}()]{0,20}(?:\^|\*\*|!))|\d{4,}\s*!|!\s*!")
_CALCULATED = re.compile(r"\d\s*[}\])]*\s*(?:\^|\*\*|!)")
_LONGEST = 1000


def _import_math_verify() -> None:
    """Loaded with the rewards: it takes a second, which no call should pay for."""
    try:
        import math_verify
    except ImportError:
        raise ValueError("needs math-verify: pip install 'postgrad[math]'") from None
    logging.getLogger(math_verify.__name__).setLevel(logging.CRITICAL)  # it warns that time-outs are off; the worker has its own


@reward(
    scope="final", claim="the final answer is an expression equal to the gold one", range=(0.0, 1.0), role="outcome",
    check_args=_import_math_verify,
)  # fmt: skip
def math_accuracy(rollout: RolloutView, answer: Any) -> float | None:
    """1 when everything that the last message commits to equals the gold expression; abstains when the gold cannot be read as mathematics.

    An answer is what stands in `\\boxed{…}`, behind `####` or "the answer is", else the last formula of the last line, else a number.
    Several different ones are wrong. So is a calculation where the gold is a plain number (`2**3` for 8): its result is left to the reader.
    """
    text = gold_text(answer)
    gold = _parsed(text)
    if gold is None:
        return None
    given = answers(rollout.final_answer)
    return float(bool(given) and all(_equal(gold, text, one) for one in given))


def gold_text(gold: Any) -> str:
    """The expression in a dataset's answer: what follows `####`, else what the last `\\boxed{…}` holds, else all of it.

    >>> gold_text("so 6 * 7 = 42 #### 42"), gold_text(r"hence $\\boxed{\\frac{1}{2}}$"), gold_text(7)
    ('42', '\\\\frac{1}{2}', '7')
    """
    text = "" if gold is None else str(gold).rpartition("####")[2].strip()
    boxed = list(_BOXED.finditer(text))
    return _bare(bracketed(text[boxed[-1].end() :]) if boxed else text)


def answers(text: str) -> list[str]:
    """Every expression that the text commits to.

    >>> answers(r"It is \\boxed{3} or \\boxed{4}."), answers("first $x = 1$,\\nso finally $x = 2$."), answers("so 6 * 7 = 42")
    (['3', '4'], ['x = 2'], ['42'])
    """
    text = answer_part(text)
    if boxed := [bracketed(text[match.end() :]) for match in _BOXED.finditer(text)]:
        return [_bare(one) for one in boxed]
    if marked := [_bare(_inside(segment)) for segment in marked_segments(text)]:
        return marked
    lines = [line for line in text.splitlines() if line.strip()]
    formulas = [next(filter(None, match.groups())) for match in _MATH.finditer(lines[-1])] if lines else []
    if formulas:
        listed = re.search(r"\$\s*(?:,|or|and|;)\s*\$", lines[-1]) is not None
        return [_bare(one) for one in (formulas if listed else formulas[-1:])]
    number = answered_number(text)
    return [] if number is None else [str(number)]


def _inside(segment: str) -> str:
    """The only formula of a segment, or the segment without the words that end its sentence."""
    formulas = [next(filter(None, match.groups())) for match in _MATH.finditer(segment)]
    if formulas:
        return ", ".join(formulas)
    return segment.strip().rstrip(".").strip()


def _bare(text: str) -> str:
    text = text.strip().strip("$").strip()
    return re.sub(r"^\\[(\[]|\\[)\]]$", "", text).strip().strip("*").rstrip(".").strip()


def _parsed(text: str) -> list[Any] | None:
    """What math-verify makes of an expression; None when it can make nothing of it."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    if not text or len(text) > _LONGEST or not re.search(r"\w", text):
        return None
    parsed = parse(f"${text}$", extraction_config=[LatexExtractionConfig(), ExprExtractionConfig()], parsing_timeout=None)
    return parsed if any(not isinstance(one, str) for one in parsed) else None


def _equal(gold: list[Any], gold_text: str, given: str) -> bool:
    from math_verify import verify

    if _EXPLOSIVE.search(given) and not _EXPLOSIVE.search(gold_text):
        return False
    plain_number = re.fullmatch(r"[-−+]?[\d.,]+", gold_text) is not None
    if plain_number and (_CALCULATED.search(given) or is_calculation(given.rpartition("=")[2])):
        return False
    parsed = _parsed(given)
    return parsed is not None and verify(gold, parsed, timeout_seconds=None)
