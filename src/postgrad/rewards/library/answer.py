"""Which part of a text is the answer: what follows the thinking, and what an explicit marker marks."""

from __future__ import annotations

import re

_MARKER = re.compile(r"\\boxed\s*\{|####\s*(?=[-−$.\d])|<answer>|\banswer\s*(?:is|:|=)", re.IGNORECASE)
_REASON = re.compile(r"\b(?:because|since|which|where)\b", re.IGNORECASE)


def answer_part(text: str) -> str:
    """The text after the thinking; empty when the thinking never ends."""
    rest = text.rpartition("</think>")[2]
    return "" if "<think>" in rest else rest


def marked_segments(text: str) -> list[str]:
    """What each marker (`\\boxed{…}`, `####`, `<answer>`, "the answer is") marks, in order: up to its closing bracket or tag, or to the end
    of the line or of the reason given for it.

    >>> marked_segments(r"so \\boxed{41}, or rather: the answer is 42 because it is")
    ['41', '42 ']
    """
    markers = list(_MARKER.finditer(text))
    ends = [*(marker.start() for marker in markers[1:]), len(text)]
    return [_marked(marker.group(), text[marker.end() : end]) for marker, end in zip(markers, ends, strict=True)] if markers else []


def _marked(marker: str, rest: str) -> str:
    if marker.endswith("{"):
        return bracketed(rest)
    if marker.lower() == "<answer>":
        return re.split(r"</answer>", rest, maxsplit=1, flags=re.IGNORECASE)[0]
    return _REASON.split(rest.lstrip().partition("\n")[0], maxsplit=1)[0]


def bracketed(text: str) -> str:
    """The text up to the brace that closes one opened before it; all of it when none does."""
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:index]
    return text


def plain(text: str) -> str:
    """The text without differences of white space and case."""
    return " ".join(text.split()).casefold()
