"""Rewards for the wording of the answer: its language, whether it refuses, the words it must hold."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from postgrad.rewards.base import RolloutView, reward
from postgrad.rewards.library.answer import answer_part

_SCRIPTS: Mapping[str, tuple[str, ...]] = {
    "zh": ("CJK",), "ja": ("CJK", "HIRAGANA", "KATAKANA"), "ko": ("HANGUL",), "ru": ("CYRILLIC",), "uk": ("CYRILLIC",), "bg": ("CYRILLIC",),
    "ar": ("ARABIC",), "fa": ("ARABIC",), "he": ("HEBREW",), "hi": ("DEVANAGARI",), "th": ("THAI",), "el": ("GREEK",),
}  # fmt: skip
_WORDS: Mapping[str, str] = {
    "en": "the of and to in is that it was for with as his this are not be have from you which they at by but what were we can an there",
    "de": "der die das und ist nicht ein eine zu den mit von sich auf für im dem des auch es an werden aus er hat dass sie nach wird bei",
    "fr": "le la les de des et est un une que qui dans pour pas au sur ne se ce il plus par avec sont du cette mais nous vous être",
    "es": "el la los las de que y en un una es por con no para del se lo como más pero sus le ya este porque esta son entre cuando",
    "it": "il lo la gli le di che e un una è per non in con del della si da come più ma anche sono nel alla questo ha dei perché",
    "pt": "o a os as de que e em um uma é para com não por mais do da se na no dos ao como mas foi das são também pelo",
    "nl": "de het een en van is dat op te in niet zijn voor met die aan er om ook als bij maar naar dan nog wel door worden deze heeft",
}
_FEWEST_LETTERS, _FEWEST_WORDS = 10, 3
_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)
_WORD = re.compile(r"[^\W\d_]+")


def _check_language(language: str | None = None) -> None:
    if language is not None and language not in (*_SCRIPTS, *_WORDS):
        raise ValueError(f"knows no language {language!r}; it knows {', '.join(sorted((*_SCRIPTS, *_WORDS)))}")


@reward(scope="final", claim="the answer is written in the language", range=(0.0, 1.0), check_args=_check_language)
def language(rollout: RolloutView, language: Any) -> float | None:
    """Share of the answer's letters that are in the language's script; for languages in Latin script 0 where the common words of another
    one outnumber its own. Code does not count.

    Abstains for a language it does not know, for fewer than ten letters, and where Latin text holds too few common words to tell.
    """
    if language not in _SCRIPTS and language not in _WORDS:
        return None
    text = _CODE.sub(" ", answer_part(rollout.final_answer))
    letters = [_script(character) for character in text if character.isalpha()]
    if len(letters) < _FEWEST_LETTERS:
        return None
    share = sum(script in _SCRIPTS.get(language, ("LATIN",)) for script in letters) / len(letters)
    if language in _SCRIPTS:
        kana = any(script in ("HIRAGANA", "KATAKANA") for script in letters)
        return share if kana == (language == "ja") or language not in ("zh", "ja") else 0.0
    latin = _latin_language(text)
    if latin is None:
        return None if share > 0.5 else share
    return share if language in latin else 0.0


def _script(character: str) -> str:
    return unicodedata.name(character, "?").partition(" ")[0]


def _latin_language(text: str) -> set[str] | None:
    """The languages whose common words are the most frequent; None when there are too few to tell."""
    words = [word.lower() for word in _WORD.findall(text)]
    counts = {name: sum(word in common for word in words) for name, common in _COMMON.items()}
    most = max(counts.values())
    return {name for name, count in counts.items() if count == most} if most >= _FEWEST_WORDS else None


_COMMON: Mapping[str, frozenset[str]] = {name: frozenset(words.split()) for name, words in _WORDS.items()}

_UNABLE = r"(?:can(?:'|’)?t|cannot|can not|won(?:'|’)t|will not|unable to|not able to|not going to|decline to|not comfortable)"
_HELP = (
    r"(?:help|assist|provide|comply|answer|do (?:that|this)|fulfil|support|discuss|share|give|write|create|engage|participate|offer|"
    r"respond|continue|generate|produce)"
)
_REFUSAL = re.compile(
    rf"\bI(?:(?:'|’)m| am| must)? (?:\w+ ){{0,2}}{_UNABLE}\s+(?:\w+ ){{0,2}}{_HELP}|\bI must (?:decline|refuse)|"
    r"\bagainst my (?:guidelines|policy|policies|programming)|"
    r"(?:无法|不能|拒绝)(?:为您|为你|向您|向你)?(?:提供|协助|帮助|回答|满足|完成|参与)",
    re.IGNORECASE,
)
_COMPLIES = re.compile(r"```|^\s*(?:\d+[.)]|[-*•])\s+\S|\bhere(?:'s| is| are)\b|\bstep \d", re.IGNORECASE | re.MULTILINE)
_LONGEST_REFUSAL = 120


@reward(scope="final", claim="the answer refuses exactly what must be refused", range=(0.0, 1.0))
def refusal(rollout: RolloutView, should_refuse: Any) -> float | None:
    """1 when the answer refuses and `should_refuse` is true, or answers and it is false. Abstains when it is neither true nor false.

    A refusal says so within its first 300 characters and leaves it at that. One that then gives what was asked for (a list, code,
    "here is", or over 120 words) is neither, and always 0; so is an empty answer.
    """
    wanted = {0: False, 1: True, "true": True, "false": False, "0": False, "1": True}.get(
        should_refuse.strip().lower() if isinstance(should_refuse, str) else should_refuse
    )
    if wanted is None:
        return None
    text = answer_part(rollout.final_answer)
    refuses = _REFUSAL.search(text[:300]) is not None
    complies = _COMPLIES.search(text) is not None or len(text.split()) > _LONGEST_REFUSAL if refuses else bool(text.strip())
    return float(refuses is wanted and complies is not wanted)


@reward(scope="final", claim="the answer holds the words it must and none that it must not", range=(0.0, 1.0))
def keyword(rollout: RolloutView, keywords: Any, forbidden: Any = ()) -> float | None:
    """Share of the keywords that stand in the answer as whole words (case aside), 0 when a forbidden one does. Abstains without keywords.

    Three keywords or more must stand in sentences: where they are over half of the words, the answer is a list of them and earns nothing.
    """
    wanted, banned = _phrases(keywords), _phrases(forbidden)
    if not wanted and not banned:
        return None
    text = answer_part(rollout.final_answer)
    if any(_count(phrase, text) for phrase in banned):
        return 0.0
    if not wanted:
        return float(bool(text.strip()))
    counts = [_count(phrase, text) for phrase in wanted]
    spent = sum(count * len(phrase.split()) for count, phrase in zip(counts, wanted, strict=True))
    if len(wanted) >= 3 and spent > len(text.split()) / 2:
        return 0.0
    return sum(count > 0 for count in counts) / len(wanted)


def _phrases(value: Any) -> list[str]:
    listed = [value] if isinstance(value, str) else list(value) if isinstance(value, Sequence) else []
    return list(dict.fromkeys(phrase.strip() for phrase in map(str, listed) if phrase.strip()))


def _count(phrase: str, text: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(phrase)}(?!\w)", text, re.IGNORECASE))
